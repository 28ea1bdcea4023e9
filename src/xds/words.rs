//! Words that many resources have in common, each kept once.

use std::collections::HashSet;
use std::sync::Arc;

/// So many words are kept without asking who still has them.
const SWEPT_MIN: usize = 1024;

/// The words of namespaces, clusters, nodes and the like. What nobody uses any more goes with time.
#[derive(Debug)]
pub(super) struct Words {
    known: HashSet<Arc<str>>,
    /// When so many are known, those that nobody uses go.
    sweep_at: usize,
}

impl Words {
    /// The one copy of a word.
    pub(super) fn share(&mut self, word: &str) -> Arc<str> {
        if word.is_empty() {
            return Arc::default();
        }
        if let Some(known) = self.known.get(word) {
            return Arc::clone(known);
        }
        if self.known.len() >= self.sweep_at {
            self.known.retain(|word| Arc::strong_count(word) > 1);
            self.sweep_at = SWEPT_MIN.max(2 * self.known.len());
        }
        let word: Arc<str> = word.into();
        self.known.insert(Arc::clone(&word));
        word
    }
}

impl Default for Words {
    fn default() -> Self {
        Self {
            known: HashSet::new(),
            sweep_at: SWEPT_MIN,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_kept_once_and_goes_when_nobody_uses_it() {
        let mut words = Words::default();
        let kept = words.share("app");
        assert!(Arc::ptr_eq(&kept, &words.share("app")));
        for at in 0..10 * SWEPT_MIN {
            words.share(&at.to_string());
        }
        assert!(words.known.len() <= SWEPT_MIN);
        assert!(Arc::ptr_eq(&kept, &words.share("app")));
    }
}
