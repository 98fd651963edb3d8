//! SentencePiece's BPE: of all neighbours that together are a piece, the pair whose piece has the
//! highest score is joined first, the leftmost of equals.
//!
//! The library's BPE has a rank for each pair instead of a score for what it makes. Ranks made
//! from scores give the same ids only as long as no two pieces have the same score, so this is a
//! model of its own.

use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, HashMap};
use std::path::{Path, PathBuf};

use powerinfer_core::Error as CoreError;
use tokenizers::models::bpe::BpeTrainer;
use tokenizers::{Model, Result, Token};

use super::{Kind, TYPES, Vocabulary};

/// Pieces with scores, and what stands for a text that is no piece.
#[derive(Debug)]
pub(in crate::text) struct Pieces {
    /// Empty where an id has no token.
    tokens: Vec<String>,
    ids: HashMap<String, u32>,
    /// The score of each token that joins can make.
    scores: Vec<Option<f32>>,
    /// Bytes of the longest of these.
    longest: usize,
    fallback: Fallback,
}

/// What a character becomes that is no piece.
#[derive(Debug)]
enum Fallback {
    /// The tokens of its bytes.
    Bytes(Box<[u32; 256]>),
    /// One token for a run of such characters.
    Unknown(u32),
}

impl Pieces {
    pub(super) fn new(
        vocabulary: &Vocabulary<'_>,
        scores: &[f32],
    ) -> std::result::Result<Self, CoreError> {
        let mut joined = vec![None; scores.len()];
        let mut longest = 0;
        for (id, token, kind) in vocabulary.iter() {
            if matches!(kind, Kind::Normal | Kind::UserDefined) {
                // no zero but one, so that equal scores are equal
                joined[id as usize] = Some(scores[id as usize] + 0.0);
                longest = longest.max(token.len());
            }
        }
        Ok(Self {
            tokens: vocabulary.tokens.iter().map(|&token| token.to_owned()).collect(),
            ids: vocabulary.ids.iter().map(|(&token, &id)| (token.to_owned(), id)).collect(),
            scores: joined,
            longest,
            fallback: Fallback::find(vocabulary)?,
        })
    }

    /// The id and the score of a text that joins can make.
    fn piece(&self, text: &str) -> Option<(u32, f32)> {
        if text.len() > self.longest {
            return None;
        }
        let id = *self.ids.get(text)?;
        self.scores[id as usize].map(|score| (id, score))
    }

    fn token(&self, id: u32, (start, end): (usize, usize)) -> Token {
        Token::new(id, self.tokens[id as usize].clone(), (start, end))
    }
}

impl Fallback {
    /// All bytes or, if some are missing, the unknown token.
    fn find(vocabulary: &Vocabulary<'_>) -> std::result::Result<Self, CoreError> {
        let mut bytes: Box<[Option<u32>; 256]> = Box::new([None; 256]);
        for (id, token, _) in vocabulary.iter().filter(|(_, _, kind)| *kind == Kind::Byte) {
            let Some(byte) = byte_of(token) else {
                let found = format!("{:?} as token {id}", super::shown(token));
                let expected = "byte tokens from <0x00> to <0xFF>";
                return Err(super::wrong(vocabulary.metadata, TYPES, expected, found));
            };
            bytes[usize::from(byte)] = Some(id);
        }
        if bytes.iter().all(Option::is_some) {
            return Ok(Self::Bytes(Box::new(bytes.map(Option::unwrap_or_default))));
        }
        let marked = vocabulary.iter().find(|(_, _, kind)| *kind == Kind::Unknown);
        let marked = marked.map(|(id, _, _)| id);
        let unknown = vocabulary.special("tokenizer.ggml.unknown_token_id", marked)?;
        unknown.map(Self::Unknown).ok_or_else(|| {
            let expected = "a token for each of the 256 bytes (6), or an unknown token (2)";
            vocabulary.metadata.error(TYPES, expected)
        })
    }
}

/// The byte that `<0x0A>` stands for.
fn byte_of(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok())?
}

/// A stretch of the text in a list of neighbours; joined into its left one it is empty.
struct Symbol {
    start: usize,
    end: usize,
    left: Option<usize>,
    right: Option<usize>,
}

/// Two neighbours that together are a piece.
struct Pair {
    score: f32,
    left: usize,
    right: usize,
    /// Bytes of the piece; a pair is stale once one of its symbols has grown or gone.
    len: usize,
}

impl Pair {
    fn key(&self) -> (Reverse<usize>, usize) {
        (Reverse(self.left), self.len)
    }
}

impl Ord for Pair {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then_with(|| self.key().cmp(&other.key()))
    }
}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Pair {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Pair {}

/// The joins of one text.
struct Joining<'a> {
    pieces: &'a Pieces,
    text: &'a str,
    symbols: Vec<Symbol>,
    queue: BinaryHeap<Pair>,
}

impl<'a> Joining<'a> {
    fn new(pieces: &'a Pieces, text: &'a str) -> Self {
        let starts = text.char_indices();
        let symbols: Vec<Symbol> = starts
            .enumerate()
            .map(|(index, (start, c))| Symbol {
                start,
                end: start + c.len_utf8(),
                left: index.checked_sub(1),
                right: (start + c.len_utf8() < text.len()).then_some(index + 1),
            })
            .collect();
        let mut this = Self { pieces, text, symbols, queue: BinaryHeap::new() };
        for right in 1..this.symbols.len() {
            this.offer(Some(right - 1), Some(right));
        }
        this
    }

    /// Queues two neighbours if they make a piece.
    fn offer(&mut self, left: Option<usize>, right: Option<usize>) {
        let (Some(left), Some(right)) = (left, right) else { return };
        let text = &self.text[self.symbols[left].start..self.symbols[right].end];
        if let Some((_, score)) = self.pieces.piece(text) {
            self.queue.push(Pair { score, left, right, len: text.len() });
        }
    }

    fn join_all(&mut self) {
        while let Some(Pair { left, right, len, .. }) = self.queue.pop() {
            let (start, middle) = (self.symbols[left].start, self.symbols[right].start);
            let end = self.symbols[right].end;
            let live = self.symbols[left].end == middle && middle < end && start < middle;
            if !live || end - start != len {
                continue;
            }
            self.symbols[left].end = end;
            self.symbols[right].start = end;
            let after = self.symbols[right].right;
            self.symbols[left].right = after;
            if let Some(after) = after {
                self.symbols[after].left = Some(left);
            }
            self.offer(self.symbols[left].left, Some(left));
            self.offer(Some(left), after);
        }
    }

    fn tokens(&self) -> Vec<Token> {
        let mut tokens: Vec<Token> = Vec::new();
        let mut after_unknown = false;
        for &Symbol { start, end, .. } in self.symbols.iter().filter(|s| s.start < s.end) {
            let piece = self.pieces.piece(&self.text[start..end]);
            match (piece, &self.pieces.fallback) {
                (Some((id, _)), _) => tokens.push(self.pieces.token(id, (start, end))),
                (None, Fallback::Bytes(ids)) => {
                    let bytes = (start..end).zip(&self.text.as_bytes()[start..end]);
                    tokens.extend(bytes.map(|(at, &byte)| {
                        self.pieces.token(ids[usize::from(byte)], (at, at + 1))
                    }));
                }
                (None, Fallback::Unknown(id)) => {
                    match tokens.last_mut().filter(|_| after_unknown) {
                        Some(run) => run.offsets.1 = end,
                        None => tokens.push(self.pieces.token(*id, (start, end))),
                    }
                }
            }
            after_unknown = piece.is_none();
        }
        tokens
    }
}

impl Model for Pieces {
    type Trainer = BpeTrainer;

    fn tokenize(&self, text: &str) -> Result<Vec<Token>> {
        let mut joining = Joining::new(self, text);
        joining.join_all();
        Ok(joining.tokens())
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.ids.get(token).copied()
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.tokens.get(id as usize).filter(|token| !token.is_empty()).cloned()
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        self.ids.clone()
    }

    fn get_vocab_size(&self) -> usize {
        self.ids.len()
    }

    fn save(&self, _: &Path, _: Option<&str>) -> Result<Vec<PathBuf>> {
        Err("pieces with scores are read out of GGUF files only".into())
    }

    fn get_trainer(&self) -> BpeTrainer {
        BpeTrainer::default()
    }
}
