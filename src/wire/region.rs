//! A part of the mesh by where it runs: `us-west-2/*` and the like, as Istio's locality settings
//! write it.

use std::fmt;

/// The parts of a locality: region, zone and subzone.
const PARTS_MAX: usize = 3;

/// Longer ones are no names of places.
const CHARS_MAX: usize = 256;

/// A region, a zone of it, a subzone of that, or everything.
///
/// Patterns have an order: what lies in `us-west-2` comes after `us-west-2`, and all after `*`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionPattern {
    /// What the first parts of a locality are.
    parts: Box<[Box<str>]>,
}

impl RegionPattern {
    /// Reads `*`, `REGION`, `REGION/ZONE` or `REGION/ZONE/SUBZONE`; a last `/*` changes nothing.
    pub fn parse(text: &str) -> Option<Self> {
        let parts = match text {
            "*" => Vec::new(),
            _ => text.strip_suffix("/*").unwrap_or(text).split('/').collect(),
        };
        let is_name = |part: &&str| {
            !part.is_empty() && !part.contains(|c: char| c == '*' || c.is_control() || c == ' ')
        };
        let fits = parts.len() <= PARTS_MAX && text.chars().count() <= CHARS_MAX;
        (fits && parts.iter().all(is_name)).then(|| Self {
            parts: parts.into_iter().map(Box::from).collect(),
        })
    }

    /// Whether something that runs there is meant.
    pub fn matches(&self, region: &str, zone: &str, subzone: &str) -> bool {
        let mut parts = self.parts.iter().zip([region, zone, subzone]);
        parts.all(|(part, own)| **part == *own)
    }

    /// How many parts of a locality it names: of several that match, the one with most is meant.
    pub fn depth(&self) -> usize {
        self.parts.len()
    }
}

impl fmt::Display for RegionPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.parts {
            [] => f.write_str("*"),
            parts => f.write_str(&parts.join("/")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_means_what_lies_in_it() {
        let west = ("us-west-2", "us-west-2a", "rack-1");
        for (text, shown, is_meant) in [
            ("*", "*", true),
            ("us-west-2", "us-west-2", true),
            ("us-west-2/*", "us-west-2", true),
            ("us-west-2/us-west-2a", "us-west-2/us-west-2a", true),
            ("us-west-2/us-west-2a/*", "us-west-2/us-west-2a", true),
            (
                "us-west-2/us-west-2a/rack-1",
                "us-west-2/us-west-2a/rack-1",
                true,
            ),
            ("us-west-2/us-west-2b", "us-west-2/us-west-2b", false),
            ("us-west", "us-west", false),
            ("us-east-1/us-west-2a", "us-east-1/us-west-2a", false),
        ] {
            let pattern = RegionPattern::parse(text).expect(text);
            assert_eq!(pattern.to_string(), shown);
            assert_eq!(pattern.matches(west.0, west.1, west.2), is_meant, "{text}");
        }
    }

    #[test]
    fn what_is_no_place_is_refused() {
        let long = "x".repeat(CHARS_MAX + 1);
        for text in [
            "", "/", "a/", "/a", "a//b", "a/*/b", "*/a", "a*", "us-*", "a/b/c/d", "a b", "a\n",
            &long,
        ] {
            assert_eq!(RegionPattern::parse(text), None, "{text:?}");
        }
    }
}
