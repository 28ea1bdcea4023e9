//! Admiral's Dependency objects: the services of other clusters that this cluster needs
//! (docs/decisions/0027).
//!
//! A service that a Dependency names is used from other clusters only while a pod of this cluster
//! has the identity of one of its sources. Each other service is used. Only the objects of one
//! namespace count, because they limit the services of all.

use std::collections::{HashMap, HashSet};
use std::iter;
use std::sync::Arc;

use super::Objects;
use super::dependency::{ANY, Dependency};
use super::entries::by_age;
use super::meta::{Labels, Meta};
use crate::config::Config;
use crate::yaml::Finding;

/// Suffix of the names that Admiral gives to identities.
const SUFFIX: &str = ".global";

/// Rule by which a service of other clusters is not used; none if it is.
type Rule = Option<Arc<str>>;

/// Services of other clusters that this cluster needs, or does not.
#[derive(Debug, Default)]
pub(super) struct Needs<'a> {
    /// By the label and identity of a service.
    labels: HashMap<(&'a str, &'a str), Rule>,
    /// By identity in lower case, as names have it.
    names: HashMap<String, Rule>,
    /// Rule for services that no other one names.
    others: Rule,
}

impl<'a> Needs<'a> {
    pub(super) fn new(objects: &'a Objects, config: &Config) -> Self {
        let mut needs = Self::default();
        let Some(namespace) = config.exposure.dependencies.as_deref() else {
            return needs;
        };
        if objects.closed.contains(namespace) {
            let rule =
                format!("a Dependency of namespace {namespace}, which is closed, may limit it");
            needs.others = Some(rule.into());
        }
        let all = dependencies(objects, config);
        let all: Vec<_> = all.filter(|one| *one.namespace == *namespace).collect();
        let keys: HashSet<&str> = all.iter().map(|one| &*one.label).collect();
        let own = config.gateway.cluster.as_str();
        let is_own = |meta: &Meta| meta.cluster.as_deref().is_none_or(|of| of == own);
        let pods = objects.pods.iter().map(|pod| &pod.meta);
        let pods = pods.filter(|meta| is_own(meta) && !meta.is_copy());
        let labels = pods.flat_map(|meta| meta.labels.iter().map(|(key, of)| (&**key, &**of)));
        let running: HashSet<_> = labels.filter(|(key, _)| keys.contains(key)).collect();
        for one in all {
            needs.add(one, &running);
        }
        needs
    }

    fn add(&mut self, one: &'a Dependency, running: &HashSet<(&str, &str)>) {
        let is_here = |source: &str| source == ANY || running.contains(&(&*one.label, source));
        let is_needed = one.source.as_deref().is_some_and(is_here);
        let rule = (!is_needed).then(|| one.rule());
        let Some(destinations) = &one.destinations else {
            self.others = self.others.take().or(rule);
            return;
        };
        for identity in destinations.iter().map(|of| &**of).filter(|of| *of != ANY) {
            let by_label = self.labels.entry((&*one.label, identity));
            let by_name = self.names.entry(identity.to_ascii_lowercase());
            let (by_label, by_name) =
                (by_label.or_insert_with(|| rule.clone()), by_name.or_insert_with(|| rule.clone()));
            // One source is enough.
            if is_needed {
                (*by_label, *by_name) = (None, None);
            }
        }
    }

    /// Returns the rule by which a service is not used from other clusters, given the labels of its
    /// objects: one of them is enough.
    pub(super) fn excludes(&self, labels: impl Iterator<Item = &'a Labels>) -> Option<&Arc<str>> {
        let labels = labels.flatten();
        self.first(labels.filter_map(|(key, value)| self.labels.get(&(&**key, &**value))))
    }

    /// The same for a name. Of several identities in it the longest one counts.
    pub(super) fn excludes_name(&self, host: &str) -> Option<&Arc<str>> {
        let stem = host.strip_suffix(SUFFIX).unwrap_or_default();
        let starts = iter::once(0).chain(stem.match_indices('.').map(|(dot, _)| dot + 1));
        let mut parts = starts.filter_map(|start| stem.get(start..));
        self.first(parts.find_map(|part| self.names.get(part)).into_iter())
    }

    fn first<'r>(&'r self, rules: impl Iterator<Item = &'r Rule>) -> Option<&'r Arc<str>> {
        let rules: Vec<_> = rules.collect();
        let others = self.others.as_ref().filter(|_| rules.is_empty());
        rules.into_iter().flatten().next().or(others)
    }
}

/// Returns the Dependency objects of the gateway's cluster.
fn dependencies<'a>(
    objects: &'a Objects,
    config: &Config,
) -> impl Iterator<Item = &'a Dependency> + use<'a> {
    let entries = by_age(&objects.entries, config).into_iter();
    entries.filter_map(|of| of.dependency.as_ref())
}

/// Returns a finding for each Dependency that does not count.
pub(super) fn without_effect(objects: &Objects, config: &Config) -> Vec<Finding> {
    let counting = config.exposure.dependencies.as_deref();
    let others = dependencies(objects, config).filter(|one| counting != Some(&*one.namespace));
    let found = others.map(|one| {
        let (what, how) = match counting {
            Some(namespace) => {
                let what = format!(
                    "limits nothing: only Dependency objects of namespace {namespace} count"
                );
                (what, "it there")
            }
            None => ("limits nothing".to_owned(), "its namespace into `exposure.dependencies`"),
        };
        Finding::warning(&one.line.0, what, how).of(&one.namespace)
    });
    found.collect()
}
