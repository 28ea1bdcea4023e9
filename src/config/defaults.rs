//! Values in force that no source gives, in the form of `strait.yaml`.

use serde_json::Value as Json;

use super::Config;
use super::define::{Absent, Key, Shape};
use super::layers::scalar;
use crate::yaml::{Kind, Node};

/// The origin of a default in `--print-config`.
pub(super) const ORIGIN: &str = "the default";

/// A section and its keys with their values in YAML; a section that is one value has the key ``.
pub(super) type Section = (&'static str, Vec<(&'static str, String)>);

/// Returns the defaults of all keys that a document lacks, by section.
pub(super) fn missing(root: &Node) -> Vec<Section> {
    let sections = Config::keys().into_iter();
    let sections = sections.map(|section| (section.name, missing_in(root, &section)));
    let mut sections: Vec<_> = sections.collect();
    if let Some(gateway) = root.get("gateway")
        && let (Some(cluster), None) = (gateway.word("cluster"), gateway.get("network"))
    {
        let own = sections.iter_mut().find(|(name, _)| *name == "gateway");
        own.into_iter()
            .for_each(|(_, keys)| keys.push(("network", scalar(cluster))));
    }
    sections
}

fn missing_in(root: &Node, section: &Key) -> Vec<(&'static str, String)> {
    let given = root.get(section.name);
    let keys = match (&section.shape, given) {
        (Shape::Map(keys), Some(_)) => keys,
        (Shape::Map(keys), None) if matches!(section.absent, Absent::Nested) => keys,
        (Shape::Kinds(kinds), Some(given)) => {
            let kind = kinds
                .iter()
                .find(|(kind, _)| given.word("kind") == Some(kind));
            let Some((_, keys)) = kind else {
                return Vec::new();
            };
            keys
        }
        (Shape::Map(_) | Shape::Kinds(_), _) => return Vec::new(),
        (_, Some(_)) => return Vec::new(),
        (_, None) => return default(section, "").into_iter().collect(),
    };
    // A section that is no map is a mistake, and has a finding.
    let is_absent = |key: &&Key| {
        given
            .is_none_or(|given| matches!(given.kind, Kind::Map(_)) && given.get(key.name).is_none())
    };
    let absent = keys.iter().filter(is_absent);
    absent.filter_map(|key| default(key, key.name)).collect()
}

fn default(key: &Key, name: &'static str) -> Option<(&'static str, String)> {
    let Absent::Value(value) = &key.absent else {
        return None;
    };
    let text = match value {
        Json::String(text) => scalar(text),
        // JSON is YAML.
        other => other.to_string(),
    };
    Some((name, text))
}
