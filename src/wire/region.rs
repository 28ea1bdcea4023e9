//! Patterns of localities such as `us-west-2/*`, in the syntax of Istio's locality settings.

use derive_more::Display;

/// Number of parts of a locality: region, zone and subzone.
const PARTS_MAX: usize = 3;

/// Limit of a pattern's length, in characters.
const CHARS_MAX: usize = 256;

/// Pattern that matches a region, a zone, a subzone or everything.
///
/// Patterns are ordered: those inside `us-west-2` come after `us-west-2`, and all come after
/// `*`.
#[derive(Clone, Debug, Display, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[display("{}", if parts.is_empty() { "*".to_owned() } else { parts.join("/") })]
pub struct RegionPattern {
    /// The first parts of a matching locality.
    parts: Box<[Box<str>]>,
}

impl RegionPattern {
    /// Parses `*`, `REGION`, `REGION/ZONE` or `REGION/ZONE/SUBZONE`, each with an optional `/*`
    /// at the end.
    pub fn parse(text: &str) -> Option<Self> {
        let parts = match text {
            "*" => Vec::new(),
            _ => text.strip_suffix("/*").unwrap_or(text).split('/').collect(),
        };
        let is_name = |part: &&str| {
            !part.is_empty() && !part.contains(|c: char| c == '*' || c.is_control() || c == ' ')
        };
        let fits = parts.len() <= PARTS_MAX && text.chars().count() <= CHARS_MAX;
        (fits && parts.iter().all(is_name))
            .then(|| Self { parts: parts.into_iter().map(Box::from).collect() })
    }

    pub fn matches(&self, region: &str, zone: &str, subzone: &str) -> bool {
        self.parts.iter().zip([region, zone, subzone]).all(|(part, own)| **part == *own)
    }

    /// Returns the number of parts in the pattern. Of several patterns that match, the one with
    /// the most parts applies.
    pub fn part_count(&self) -> usize {
        self.parts.len()
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
            ("us-west-2/us-west-2a/rack-1", "us-west-2/us-west-2a/rack-1", true),
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
