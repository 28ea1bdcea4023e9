//! Words and localities that many resources have in common, each kept once.

use std::collections::HashSet;
use std::hash::Hash;
use std::sync::Arc;

use crate::snapshot::Locality;
use crate::snapshot::mesh::Template;

/// So many are kept without asking who still has them.
const SWEPT_MIN: usize = 1024;

/// Namespaces, clusters, nodes and the like. What nobody uses any more goes with time.
#[derive(Debug, Default)]
pub(super) struct Words {
    words: Shared<str>,
    localities: Shared<Locality>,
    templates: Shared<Template>,
}

impl Words {
    /// The one copy of a word.
    pub(super) fn share(&mut self, word: &str) -> Arc<str> {
        if word.is_empty() {
            return Arc::default();
        }
        let known = self.words.known.get(word).cloned();
        known.unwrap_or_else(|| self.words.put(word.into()))
    }

    /// The one copy of a locality.
    pub(super) fn share_locality(&mut self, locality: Locality) -> Arc<Locality> {
        let known = self.localities.known.get(&locality).cloned();
        known.unwrap_or_else(|| self.localities.put(locality.into()))
    }

    /// Returns the one copy of a template.
    pub(super) fn share_template(&mut self, template: Template) -> Arc<Template> {
        let known = self.templates.known.get(&template).cloned();
        known.unwrap_or_else(|| self.templates.put(template.into()))
    }
}

#[derive(Debug)]
struct Shared<T: Eq + Hash + ?Sized> {
    known: HashSet<Arc<T>>,
    /// When so many are known, those that nobody uses go.
    sweep_at: usize,
}

impl<T: Eq + Hash + ?Sized> Shared<T> {
    fn put(&mut self, new: Arc<T>) -> Arc<T> {
        if self.known.len() >= self.sweep_at {
            self.known.retain(|known| Arc::strong_count(known) > 1);
            self.sweep_at = SWEPT_MIN.max(2 * self.known.len());
        }
        self.known.insert(Arc::clone(&new));
        new
    }
}

impl<T: Eq + Hash + ?Sized> Default for Shared<T> {
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
        assert!(words.words.known.len() <= SWEPT_MIN);
        assert!(Arc::ptr_eq(&kept, &words.share("app")));
    }

    #[test]
    fn a_locality_is_kept_once() {
        let mut words = Words::default();
        let mut share = || words.share_locality(Locality::default());
        assert!(Arc::ptr_eq(&share(), &share()));
    }
}
