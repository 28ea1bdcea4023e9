//! Transit of services: by their entries, and by rules for entries and exports that state none.

use std::cmp::Reverse;

use super::ExposureTable;
pub use crate::config::TransitRule;
use crate::wire::Transit;
use crate::wire::sni::SniPattern;

impl TransitRule {
    /// Returns the key by which rules are ordered: hostname, wildcard, the longest first, namespace
    /// and default.
    fn order(&self) -> (u8, Reverse<usize>) {
        match (&self.service, &self.namespace) {
            (Some(SniPattern::Exact(_)), _) => (0, Reverse(0)),
            (Some(SniPattern::Wildcard(name)), _) => (1, Reverse(name.len())),
            (_, Some(_)) => (2, Reverse(0)),
            (_, None) => (3, Reverse(0)),
        }
    }
}

impl ExposureTable {
    /// Adds the rules for entries and exports that state no transit.
    #[must_use]
    pub fn with_transit(mut self, rules: impl IntoIterator<Item = TransitRule>) -> Self {
        self.transit_rules = rules.into_iter().collect();
        self.transit_rules.sort_by_key(TransitRule::order);
        let mut granting = self.transit_rules.iter();
        self.has_transit |= granting.any(|rule| rule.transit > Transit::Off);
        self
    }

    /// Returns the first rule that applies to a service of this namespace. `has_name` returns
    /// whether a name of it matches a pattern.
    pub(in crate::snapshot) fn transit_rule(
        &self,
        namespace: Option<&str>,
        has_name: impl Fn(&SniPattern) -> bool,
    ) -> Option<&TransitRule> {
        self.transit_rules.iter().find(|rule| {
            let is_its = rule.namespace.as_deref();
            rule.service.as_ref().is_none_or(&has_name)
                && is_its.is_none_or(|only| namespace == Some(only))
        })
    }
}
