//! Token ids to text, one id at a time.
//!
//! A token is a string of bytes that may begin or end inside a character, so the text of a stream
//! is not the sum of the texts of its tokens. Two ways, by the decoder that the tokenizer file
//! names:
//!
//! - *Byte level* (GPT-2's alphabet, a printable character a byte): the bytes of each token are
//!   known, and turning bytes into text piece by piece is what UTF-8 is made for. At most three
//!   bytes wait for the rest of their character. The result equals `String::from_utf8_lossy` of
//!   all bytes, for any sequence of ids.
//! - *Any other decoder* is a black box over a whole sequence that may look at neighbours (a
//!   leading space stripped, byte tokens fused). It is asked twice, for a short window of
//!   tokens already shown and for the same window with the new tokens behind it; what the
//!   second text has more is the new text, unless it ends in U+FFFD, which may be half a
//!   character. A stream that goes on after a prompt begins with the end of the prompt as shown, so
//!   that a space between the two is not taken for one in front of the text.

use super::Tokenizer;
use crate::error::Result;

/// After so many tokens without a text to show, U+FFFD at the end is taken for what it is: the
/// longest character has four bytes.
const MAX_WAITING: usize = 8;

/// The state of one stream; the tokenizer is passed to each call so that a stream can live beside
/// it without borrowing it.
#[derive(Debug, Default)]
pub(crate) struct StreamDecoder {
    /// Byte level: the bytes of a character that is not complete.
    bytes: Vec<u8>,
    /// Otherwise: tokens already shown, then tokens waiting.
    window: Vec<u32>,
    n_shown: usize,
    shown_text: String,
}

impl StreamDecoder {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// A stream that goes on where the text of `context` ends.
    pub(crate) fn after(tokenizer: &Tokenizer, context: &[u32]) -> Result<Self> {
        if tokenizer.byte_level {
            return Ok(Self::default());
        }
        let with_text = context.iter().rev().filter(|&&id| tokenizer.text_token(id).is_some());
        let mut window: Vec<u32> = with_text.take(MAX_WAITING).copied().collect();
        window.reverse();
        let mut shown_text = tokenizer.decode_window(&window)?;
        // bytes cut off a character would spoil those that follow
        while shown_text.starts_with(char::REPLACEMENT_CHARACTER) {
            window.remove(0);
            shown_text = tokenizer.decode_window(&window)?;
        }
        Ok(Self { n_shown: window.len(), window, shown_text, ..Self::default() })
    }

    /// The text that `id` completes, often empty.
    pub(crate) fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String> {
        let Some(token) = tokenizer.text_token(id) else {
            return Ok(String::new());
        };
        if tokenizer.byte_level {
            push_token_bytes(&token, &mut self.bytes);
            return Ok(take_complete(&mut self.bytes));
        }
        self.window.push(id);
        let text = tokenizer.decode_window(&self.window)?;
        let waiting = self.window.len() - self.n_shown;
        let undecided =
            text.ends_with(char::REPLACEMENT_CHARACTER) || text.len() <= self.shown_text.len();
        if undecided && waiting < MAX_WAITING {
            return Ok(String::new());
        }
        self.show(tokenizer, &text)
    }

    /// The text that was waiting for more tokens, now that none follow.
    pub(crate) fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String> {
        if tokenizer.byte_level {
            let rest = String::from_utf8_lossy(&self.bytes).into_owned();
            self.bytes.clear();
            return Ok(rest);
        }
        if self.n_shown == self.window.len() {
            return Ok(String::new());
        }
        let text = tokenizer.decode_window(&self.window)?;
        self.show(tokenizer, &text)
    }

    /// What `text`, the text of the window, has more than was shown; the waiting tokens become
    /// the shown ones.
    fn show(&mut self, tokenizer: &Tokenizer, text: &str) -> Result<String> {
        let new = text[common_prefix(&self.shown_text, text)..].to_owned();
        self.window.drain(..self.n_shown);
        self.n_shown = self.window.len();
        self.shown_text = tokenizer.decode_window(&self.window)?;
        Ok(new)
    }
}

/// Appends the bytes that a token of the byte-level alphabet stands for; a token with a character
/// outside that alphabet (an added token) stands for its own UTF-8.
fn push_token_bytes(token: &str, out: &mut Vec<u8>) {
    let start = out.len();
    for c in token.chars() {
        match byte_of(c) {
            Some(byte) => out.push(byte),
            None => {
                out.truncate(start);
                out.extend_from_slice(token.as_bytes());
                return;
            }
        }
    }
}

/// GPT-2's `bytes_to_unicode`, backwards: printable Latin-1 stands for itself, the other 68 bytes
/// stand in order from U+0100 on.
fn byte_of(c: char) -> Option<u8> {
    let code = u32::from(c);
    let byte = match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => code,
        0x100..=0x120 => code - 0x100,
        0x121..=0x142 => code - 0x121 + 0x7f,
        0x143 => 0xad,
        _ => return None,
    };
    u8::try_from(byte).ok()
}

/// Takes from `bytes` all that is decided, with U+FFFD for each maximal run that is no UTF-8, and
/// leaves the beginning of a character.
fn take_complete(bytes: &mut Vec<u8>) -> String {
    let mut text = String::new();
    let mut rest = bytes.as_slice();
    loop {
        let (valid, invalid) = match std::str::from_utf8(rest) {
            Ok(valid) => (valid.len(), 0),
            Err(error) => (error.valid_up_to(), error.error_len().unwrap_or(0)),
        };
        text.push_str(&String::from_utf8_lossy(&rest[..valid]));
        rest = &rest[valid + invalid..];
        if invalid == 0 {
            break;
        }
        text.push(char::REPLACEMENT_CHARACTER);
    }
    let taken = bytes.len() - rest.len();
    bytes.drain(..taken);
    text
}

/// Bytes that both texts begin with, on a character border.
fn common_prefix(a: &str, b: &str) -> usize {
    let same = a.chars().zip(b.chars()).take_while(|(x, y)| x == y);
    same.map(|(c, _)| c.len_utf8()).sum()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;

    use super::*;

    const DEMO: &str =
        concat!(env!("CARGO_MANIFEST_DIR"), "/assets/llama-relu-tiny/tokenizer.json");

    fn streamed(tokenizer: &Tokenizer, ids: &[u32]) -> String {
        tokenizer.decode(ids).unwrap()
    }

    fn one_shot(tokenizer: &Tokenizer, ids: &[u32]) -> String {
        tokenizer.inner.decode(ids).unwrap()
    }

    /// A SentencePiece-like tokenizer as of LLaMA 2: `▁` for spaces, byte tokens, a stripped
    /// leading space.
    fn sentencepiece() -> (tempfile::TempDir, Tokenizer) {
        let mut vocab = serde_json::Map::new();
        for token in ["<unk>", "<s>", "</s>"] {
            vocab.insert(token.to_owned(), vocab.len().into());
        }
        for byte in 0..=255u8 {
            vocab.insert(format!("<0x{byte:02X}>"), vocab.len().into());
        }
        for token in ["▁", "▁Hello", "▁wor", "ld", ".", "é", "日"] {
            vocab.insert(token.to_owned(), vocab.len().into());
        }
        let special = |id: u32, content: &str| {
            serde_json::json!({"id": id, "content": content, "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false, "special": true})
        };
        let json = serde_json::json!({
            "version": "1.0",
            "added_tokens": [special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")],
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
            "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true,
                "byte_fallback": true, "vocab": vocab, "merges": []},
        });
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokenizer.json");
        fs::write(&path, json.to_string()).unwrap();
        let tokenizer = Tokenizer::from_file(&path).unwrap();
        (dir, tokenizer)
    }

    #[test]
    fn the_alphabet_maps_256_characters_to_256_bytes() {
        let mut bytes: Vec<u8> =
            (0..0x200).filter_map(char::from_u32).filter_map(byte_of).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
    }

    #[test]
    fn half_a_character_waits_and_is_replaced_at_the_end() {
        let tokenizer = Tokenizer::from_file(DEMO).unwrap();
        let whale = tokenizer.encode("🐋", false).unwrap();
        assert_eq!(whale.len(), 4);
        let mut decoder = StreamDecoder::new();
        for &id in &whale[..3] {
            assert_eq!(decoder.push(&tokenizer, id).unwrap(), "");
        }
        assert_eq!(decoder.push(&tokenizer, whale[3]).unwrap(), "🐋");
        assert_eq!(decoder.push(&tokenizer, whale[0]).unwrap(), "");
        assert_eq!(decoder.finish(&tokenizer).unwrap(), "\u{fffd}");
        assert_eq!(decoder.finish(&tokenizer).unwrap(), "");
    }

    #[test]
    fn other_decoders_stream_what_they_decode_at_once() {
        let (_dir, tokenizer) = sentencepiece();
        assert!(!tokenizer.byte_level);
        let id = |token: &str| tokenizer.token_id(token).unwrap();
        let words = [id("▁Hello"), id("▁wor"), id("ld"), id(".")];
        assert_eq!(streamed(&tokenizer, &words), "Hello world.");
        let leading = [id("▁"), id("▁Hello"), id("▁"), id("▁wor")];
        assert_eq!(streamed(&tokenizer, &leading), one_shot(&tokenizer, &leading));
        let bytes: Vec<u32> = "🐋é".bytes().map(|b| id(&format!("<0x{b:02X}>"))).collect();
        let mixed = [&words[..], &bytes, &[id("日"), 2, id("▁Hello")]].concat();
        assert_eq!(streamed(&tokenizer, &mixed), "Hello world.🐋é日 Hello");
        let mut decoder = StreamDecoder::new();
        for &byte in &bytes[..3] {
            assert_eq!(decoder.push(&tokenizer, byte).unwrap(), "");
        }
        assert_eq!(decoder.push(&tokenizer, bytes[3]).unwrap(), "🐋");
    }

    #[test]
    fn a_text_that_goes_on_keeps_the_space_before_it() {
        let (_dir, tokenizer) = sentencepiece();
        let id = |token: &str| tokenizer.token_id(token).unwrap();
        let text = [1, id("▁Hello"), id("▁wor"), id("ld"), id("▁"), id("▁Hello"), id(".")];
        for at in 0..=text.len() {
            let (context, rest) = text.split_at(at);
            let mut decoder = StreamDecoder::after(&tokenizer, context).unwrap();
            let mut whole = one_shot(&tokenizer, context);
            for &id in rest {
                whole.push_str(&decoder.push(&tokenizer, id).unwrap());
            }
            whole.push_str(&decoder.finish(&tokenizer).unwrap());
            assert_eq!(whole, "Hello world  Hello.", "after {at} tokens");
        }
    }

    #[test]
    fn many_useless_byte_tokens_do_not_pile_up() {
        let (_dir, tokenizer) = sentencepiece();
        let id = tokenizer.token_id("<0xFF>").unwrap();
        let mut decoder = StreamDecoder::new();
        for _ in 0..1000 {
            decoder.push(&tokenizer, id).unwrap();
            assert!(decoder.window.len() <= 2 * MAX_WAITING);
        }
        assert_eq!(streamed(&tokenizer, &[id; 100]), "\u{fffd}".repeat(100));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(10_000))]

        #[test]
        fn any_byte_level_ids_stream_to_the_one_shot_text(
            ids in prop::collection::vec(prop_oneof![0u32..300, 0u32..4200], 0..40),
        ) {
            thread_local!(static DEMO_TOKENIZER: Tokenizer = Tokenizer::from_file(DEMO).unwrap());
            DEMO_TOKENIZER.with(|tokenizer| {
                assert_eq!(streamed(tokenizer, &ids), one_shot(tokenizer, &ids));
            });
        }
    }

    proptest! {
        #[test]
        fn any_valid_sentencepiece_text_streams_to_the_one_shot_text(text in "[Helo wrd.é日ß🐋]{0,30}") {
            thread_local!(static TOKENIZER: (tempfile::TempDir, Tokenizer) = sentencepiece());
            TOKENIZER.with(|(_, tokenizer)| {
                let ids = tokenizer.encode(&text.replace(' ', "▁"), false).unwrap();
                assert_eq!(streamed(tokenizer, &ids), one_shot(tokenizer, &ids));
                let (context, rest) = ids.split_at(ids.len() / 2);
                let mut decoder = StreamDecoder::after(tokenizer, context).unwrap();
                let mut found = String::new();
                for &id in rest {
                    found.push_str(&decoder.push(tokenizer, id).unwrap());
                }
                found.push_str(&decoder.finish(tokenizer).unwrap());
                let before = one_shot(tokenizer, context);
                // a context that ends within a character has no text to go on from
                if !before.ends_with(char::REPLACEMENT_CHARACTER) {
                    assert_eq!(before + &found, one_shot(tokenizer, &ids));
                }
            });
        }
    }
}
