//! Dependency objects of Admiral: a source, and the services that it depends on.
//!
//! Both are values of a label, which Admiral calls identities.

use std::sync::Arc;

use super::meta::{Meta, bounded};
use crate::config::Line;
use crate::yaml::Value;

/// Admiral's default label of an identity.
pub(super) const IDENTITY: &str = "identity";

/// Source that is in every cluster.
pub(super) const ANY: &str = "*";

/// Limit of a label's key in bytes, which is also more than any value has: that of Kubernetes.
const TEXT_MAX: usize = 317;

/// Dependency: the services that a source depends on.
#[derive(Clone, Debug)]
pub(super) struct Dependency {
    /// Identity of the source; none if it cannot be read.
    pub(super) source: Option<Box<str>>,
    /// Label of pods and Services with their identity.
    pub(super) label: Box<str>,
    /// Identities of the services; none if they cannot be read, so that they may be any.
    pub(super) destinations: Option<Vec<Box<str>>>,
    pub(super) namespace: Arc<str>,
    pub(super) line: Line,
}

impl Dependency {
    /// Returns the Dependency of an object whose `spec` is unknown.
    pub(super) fn unknown(meta: &Meta) -> Self {
        Self {
            source: None,
            label: IDENTITY.into(),
            destinations: None,
            namespace: Arc::clone(&meta.namespace),
            line: Line(meta.place.clone()),
        }
    }

    pub(super) fn read(&mut self, spec: Value<'_>) {
        let Some(mut fields) = spec.foreign("spec") else { return };
        let source = fields.need("source", "orders").and_then(short);
        let label = fields.get("identityLabel").map_or(Some(IDENTITY), short);
        let destinations = fields.need("destinations", "[payments]");
        fields.warn_of_others();
        self.source = source.filter(|_| label.is_some()).map(Into::into);
        self.label = label.unwrap_or(IDENTITY).into();
        let is_list = destinations.is_some_and(Value::is_list);
        let names = destinations.and_then(|list| list.all(short)).filter(|_| is_list);
        let has_any = names.as_ref().is_some_and(|names| names.contains(&ANY));
        if let Some(list) = destinations.filter(|_| has_any) {
            list.warning("has `*`, which limits no service", "the identities of services");
        }
        // With an unknown label they may be any as well.
        let names = names.filter(|_| label.is_some());
        self.destinations = names.map(|names| names.into_iter().map(Into::into).collect());
    }

    /// Returns the Dependency of an invalid object: no cluster has its source.
    pub(super) fn closed(self) -> Self {
        Self { source: None, ..self }
    }

    /// Returns the rule by which a cluster without its source does not use a service.
    pub(super) fn rule(&self) -> Arc<str> {
        let Self { line, label, source, .. } = self;
        let rule = match source {
            Some(source) => format!(
                "{line} limits it to clusters with a pod that has the label `{label}: {source}`, \
                 and this one has none"
            ),
            None => format!("{line} is invalid, and may limit it"),
        };
        rule.into()
    }
}

/// Reads the key or the value of a label.
fn short(value: Value<'_>) -> Option<&str> {
    bounded(value, TEXT_MAX, "the key or the value of a label")
}
