//! Names of bindings with their addresses, and the families of which no other names exist.
//!
//! A binding at a specific address has that one. One at a wildcard has a VIP, which is derived from
//! the name: restarts and other gateways give it the same VIP, unless two names have the same hash.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use crate::config::{Config, vip};

/// Names in lower case without trailing dot.
#[derive(Debug, Default)]
pub(super) struct Names {
    addresses: BTreeMap<String, BTreeSet<IpAddr>>,
    families: Vec<String>,
}

/// Result of a search for a name.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Known<'a> {
    Addresses(&'a BTreeSet<IpAddr>),
    /// It does not exist in its family.
    Absent,
    /// It belongs to no family.
    Foreign,
}

static NO_ADDRESSES: BTreeSet<IpAddr> = BTreeSet::new();

impl Names {
    pub(super) fn new(config: &Config) -> Self {
        let mut addresses: BTreeMap<String, BTreeSet<IpAddr>> = BTreeMap::new();
        let mut virtual_names = BTreeSet::new();
        for binding in &config.bindings {
            let ip = binding.listen.ip().to_canonical();
            for name in &binding.names {
                let of = addresses.entry(name.clone()).or_default();
                if ip.is_unspecified() {
                    virtual_names.insert(name);
                } else {
                    of.insert(ip);
                }
            }
        }
        let mut taken = BTreeSet::new();
        for name in virtual_names {
            let of = addresses.entry(name.clone()).or_default();
            of.extend(vip(config.dns.vips, name, &mut taken));
        }
        Self { addresses, families: config.dns.families.clone() }
    }

    pub(super) fn find(&self, name: &str) -> Known<'_> {
        if let Some(addresses) = self.addresses.get(name) {
            return Known::Addresses(addresses);
        }
        if self.families_of(name).next().is_none() {
            Known::Foreign
        } else if self.is_inner(name) {
            Known::Addresses(&NO_ADDRESSES)
        } else {
            Known::Absent
        }
    }

    /// Returns the zone of a name: its longest family, or else the name itself.
    pub(super) fn zone<'a>(&'a self, name: &'a str) -> &'a str {
        let longest = self.families_of(name).max_by_key(|family| family.len());
        longest.unwrap_or(name)
    }

    fn families_of(&self, name: &str) -> impl Iterator<Item = &str> {
        let is_in = move |family: &&str| {
            let stem = name.strip_suffix(family);
            stem.is_some_and(|stem| stem.is_empty() || stem.ends_with('.'))
        };
        self.families.iter().map(String::as_str).filter(is_in)
    }

    /// Returns whether a name is that of a family, or between a family and a name of it. Such names
    /// exist, but have no addresses (RFC 8020).
    fn is_inner(&self, name: &str) -> bool {
        let is_below = |one: &String| {
            let rest = one.strip_suffix(name);
            rest.is_some_and(|rest| rest.ends_with('.'))
        };
        self.families.iter().any(|family| family == name) || self.addresses.keys().any(is_below)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::path::Path;

    use ipnet::IpNet;

    use super::*;

    /// Returns the names of bindings at these addresses, under the family `*.global`.
    pub(in crate::responder) fn config(bindings: &[(&str, &str)], vips: &str) -> Config {
        let binding = |(name, listen): &(&str, &str)| {
            format!(
                "{{cluster: west, service: \"echo.app:80\", listen: \"{listen}\", names: [{name}]}}"
            )
        };
        let bindings: Vec<_> = bindings.iter().map(binding).collect();
        let text = format!(
            r#"gateway: {{cluster: east}}
identity: {{kind: spiffe, socket: "unix:///dev/null"}}
trust: {{domains: [{{name: east.local, cluster: east}}, {{name: west.local, cluster: west}}]}}
listeners: [{{name: a, bind: "127.0.0.1:0"}}]
discovery: {{kind: file, path: /dev/null}}
dns: {{families: ["*.global"], vips: "{vips}"}}
bindings: [{}]
"#,
            bindings.join(", ")
        );
        let (config, findings) = Config::parse(Path::new("c"), &text);
        config.unwrap_or_else(|| panic!("{findings}"))
    }

    fn addresses(names: &Names, name: &str) -> Vec<String> {
        match names.find(name) {
            Known::Addresses(all) => all.iter().map(ToString::to_string).collect(),
            other => panic!("{name}: {other:?}"),
        }
    }

    #[test]
    fn a_name_has_the_addresses_of_its_bindings_or_a_vip_that_stays() {
        let wild = ("echo.global", "0.0.0.0:8080");
        let bindings = [
            ("a.global", "127.0.0.2:80"),
            ("a.global", "127.0.0.3:81"),
            ("other.example", "127.0.0.4:80"),
            ("echo.prod.global", "127.0.0.5:80"),
            wild,
        ];
        let names = Names::new(&config(&bindings, "240.0.0.0/4"));
        assert_eq!(addresses(&names, "a.global"), ["127.0.0.2", "127.0.0.3"]);
        assert_eq!(addresses(&names, "other.example"), ["127.0.0.4"]);
        let vip = addresses(&names, "echo.global");
        let network: IpNet = "240.0.0.0/4".parse().expect("a network");
        assert!(network.contains(&vip[0].parse::<IpAddr>().expect("an address")));
        let alone = Names::new(&config(&[wild], "240.0.0.0/4"));
        assert_eq!(addresses(&alone, "echo.global"), vip);
        for (name, known) in [
            ("b.global", Known::Absent),
            ("x.echo.global", Known::Absent),
            ("global", Known::Addresses(&NO_ADDRESSES)),
            ("prod.global", Known::Addresses(&NO_ADDRESSES)),
            ("notglobal", Known::Foreign),
            ("example", Known::Foreign),
        ] {
            assert_eq!(names.find(name), known, "{name}");
        }
    }

    #[test]
    fn names_with_the_same_hash_have_different_vips_until_none_is_left() {
        let network: IpNet = "192.0.2.0/29".parse().expect("a network");
        let mut taken = BTreeSet::new();
        let vips: BTreeSet<_> = (0..6)
            .map(|index| vip(network, &format!("name-{index}"), &mut taken).expect("a VIP"))
            .collect();
        assert_eq!(vips.len(), 6);
        assert!(!vips.contains(&network.network()) && !vips.contains(&network.broadcast()));
        assert_eq!(vip(network, "one-more", &mut taken), None);
        let v6: IpNet = "fd00::/64".parse().expect("a network");
        let found = vip(v6, "a", &mut BTreeSet::new()).expect("a VIP");
        assert!(v6.contains(&found));
        assert_eq!(vip("10.0.0.1/32".parse().expect("one"), "a", &mut taken), None);
    }
}
