//! Stop strings over a stream of text: nothing of a stop string, and nothing after it, gets out.
//!
//! The text arrives in pieces that know nothing of stop strings, so whatever might still turn out
//! to be the beginning of one is held back until more text decides. Of several stop strings the
//! one that is complete first wins (of those that are complete together, the longest), which does
//! not depend on where the pieces were cut.

/// The stop strings of one request and the text held back on their account.
#[derive(Debug)]
pub(crate) struct StopStrings {
    stops: Vec<String>,
    held: String,
}

/// What became of a piece of text.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Released {
    /// Text that can no longer be part of a stop string.
    pub(crate) text: String,
    /// The stop string that the text ran into.
    pub(crate) stop: Option<String>,
}

impl StopStrings {
    /// `stops` holds no empty string.
    pub(crate) fn new(stops: Vec<String>) -> Self {
        Self { stops, held: String::new() }
    }

    /// Takes the next piece of text; after a stop string was found all further text is dropped by
    /// the caller.
    pub(crate) fn push(&mut self, piece: String) -> Released {
        if self.stops.is_empty() {
            return Released { text: piece, stop: None };
        }
        self.held.push_str(&piece);
        if let Some((start, stop)) = self.first_complete() {
            let stop = Some(stop.to_owned());
            self.held.truncate(start);
            return Released { text: std::mem::take(&mut self.held), stop };
        }
        let undecided = self.held.split_off(self.held.len() - self.undecided_bytes());
        Released { text: std::mem::replace(&mut self.held, undecided), stop: None }
    }

    /// The text that was held back, now that no more follows.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Start and text of the stop string that ends first, the longest of those that end there.
    fn first_complete(&self) -> Option<(usize, &str)> {
        let found = self.stops.iter().filter_map(|stop| {
            let start = self.held.find(stop.as_str())?;
            Some((start + stop.len(), start, stop.as_str()))
        });
        let (_, start, stop) = found.min_by_key(|&(end, start, _)| (end, start))?;
        Some((start, stop))
    }

    /// Length of the longest end of the held text that some stop string begins with.
    fn undecided_bytes(&self) -> usize {
        let longest = |stop: &String| {
            let most = self.held.len().min(stop.len() - 1);
            (1..=most).rev().find(|&n| self.held.as_bytes().ends_with(&stop.as_bytes()[..n]))
        };
        self.stops.iter().filter_map(longest).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn stops(list: &[&str]) -> StopStrings {
        StopStrings::new(list.iter().map(|&s| s.to_owned()).collect())
    }

    fn run(mut stops: StopStrings, pieces: &[&str]) -> (String, Option<String>) {
        let mut text = String::new();
        for piece in pieces {
            let released = stops.push((*piece).to_owned());
            text.push_str(&released.text);
            if released.stop.is_some() {
                return (text, released.stop);
            }
        }
        (text + &stops.finish(), None)
    }

    #[test]
    fn without_stop_strings_text_passes_at_once() {
        let released = stops(&[]).push("abc".to_owned());
        assert_eq!(released.text, "abc");
    }

    #[test]
    fn a_possible_beginning_is_held_until_decided() {
        let mut matcher = stops(&["END"]);
        assert_eq!(matcher.push("one E".to_owned()).text, "one ");
        assert_eq!(matcher.push("N".to_owned()).text, "");
        assert_eq!(matcher.push("O".to_owned()).text, "ENO");
        assert_eq!(matcher.push("EEN".to_owned()).text, "E");
        let last = matcher.push("D and more".to_owned());
        assert_eq!((last.text.as_str(), last.stop.as_deref()), ("", Some("END")));
    }

    #[test]
    fn text_held_at_the_end_is_given_out() {
        assert_eq!(run(stops(&["END"]), &["the E", "N"]), ("the EN".to_owned(), None));
    }

    #[test]
    fn the_first_complete_stop_wins_and_then_the_longest() {
        let (text, stop) = run(stops(&["abcd", "bc"]), &["xabcd"]);
        assert_eq!((text.as_str(), stop.as_deref()), ("xa", Some("bc")));
        let (text, stop) = run(stops(&["bc", "abc"]), &["xa", "bcd"]);
        assert_eq!((text.as_str(), stop.as_deref()), ("x", Some("abc")));
    }

    #[test]
    fn stop_strings_of_several_bytes_a_char_are_cut_on_char_borders() {
        let (text, stop) = run(stops(&["é"]), &["caf", "è", "é!"]);
        assert_eq!((text.as_str(), stop.as_deref()), ("cafè", Some("é")));
    }

    proptest! {
        #[test]
        fn the_cuts_between_pieces_do_not_matter(
            text in "[abé]{0,40}",
            list in prop::collection::vec("[abé]{1,4}", 0..4),
            cuts in prop::collection::vec(0usize..40, 0..8),
        ) {
            let list: Vec<&str> = list.iter().map(String::as_str).collect();
            let whole = run(stops(&list), &[&text]);
            let mut cuts: Vec<usize> =
                cuts.into_iter().filter(|&c| text.is_char_boundary(c)).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&str> = cuts.windows(2).map(|w| &text[w[0]..w[1]]).collect();
            let cut = run(stops(&list), &pieces);
            prop_assert_eq!(&cut, &whole);
            prop_assert!(list.iter().all(|stop| !cut.0.contains(stop)));
        }
    }
}
