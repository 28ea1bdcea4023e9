//! Authorization policies as plain data (Istio's L4 policies), and their matching.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use serde_json::json;

use super::trust::Caller;

/// Policy: its scope, its action and its rules. It is serialized as ztunnel does; istioctl does not
/// know `unreadable`.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Policy {
    pub name: String,
    pub namespace: String,
    pub scope: PolicyScope,
    pub action: Action,
    /// Rules, of which one must match. A policy without rules never matches.
    pub rules: Vec<Rule>,
    /// True if the policy only logs.
    pub dry_run: bool,
    /// True if it replaces a policy that could not be read. It then rejects everything in its scope
    /// (docs/wire-contract.md 5.3).
    pub unreadable: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum PolicyScope {
    Global,
    /// Workloads of the policy's namespace.
    Namespace,
    /// Workloads that name the policy.
    #[serde(rename = "WorkloadSelector")]
    Selected,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Action {
    Allow,
    Deny,
}

/// Rule, which matches if all of its clauses do. A rule without clauses always matches.
pub type Rule = Vec<Clause>;

/// Clause, which matches if one of its matches holds or if it has none.
pub type Clause = Vec<Match>;

/// Conditions that must all hold. A match without any condition never holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Match {
    pub namespaces: Condition<StringMatch>,
    /// Condition on the peer's identity without `spiffe://`.
    pub principals: Condition<StringMatch>,
    /// Condition on the peer's service account, as namespace and name.
    pub service_accounts: Condition<(String, String)>,
    /// Condition on the peer's address.
    pub source_ips: Condition<IpNet>,
    /// Condition on the endpoint's address.
    pub destination_ips: Condition<IpNet>,
    pub destination_ports: Condition<u16>,
}

/// Pair of lists about one attribute. The condition holds if `any` is empty or contains a match,
/// and `none` contains no match.
#[derive(Clone, Debug, PartialEq)]
pub struct Condition<T> {
    /// Values of which one must match.
    pub any: Vec<T>,
    /// Values of which none may match.
    pub none: Vec<T>,
}

/// Condition on a string, case-sensitive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub enum StringMatch {
    Exact(String),
    Prefix(String),
    Suffix(String),
    /// Matches any string that is not empty.
    Presence(),
}

/// Known attributes of a request for which policies are evaluated.
#[derive(Clone, Copy, Debug)]
pub struct Attributes<'a> {
    pub peer: Option<Caller<'a>>,
    /// Address of the peer. Unknown for an HBONE endpoint.
    pub source: Option<IpAddr>,
    pub destination: IpAddr,
    /// Port of the endpoint. Unknown for an HBONE endpoint, where the inner CONNECT names it.
    pub port: Option<u16>,
}

impl Policy {
    /// Returns a policy that replaces one that could not be read.
    pub fn deny_all_unreadable(
        namespace: String,
        name: String,
        scope: PolicyScope,
        dry_run: bool,
    ) -> Self {
        Self {
            name,
            namespace,
            scope,
            action: Action::Deny,
            rules: vec![Rule::new()],
            dry_run,
            unreadable: true,
        }
    }

    /// Returns the name in the form that workloads use, `namespace/name`.
    pub fn full_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// Returns the total number of rules, clauses, matches and list entries.
    pub fn size(&self) -> usize {
        let clauses = || self.rules.iter().flatten();
        let matches = || clauses().flatten();
        let entries: usize = matches().map(Match::entries).sum();
        self.rules.len() + clauses().count() + matches().count() + entries
    }

    /// Returns whether the policy matches.
    ///
    /// A condition on an unknown source or port holds for an ALLOW and fails for a DENY. The
    /// gateway thus rejects only tunnels that the destination, which has these attributes, would
    /// reject for any value of them.
    pub fn matches(&self, attributes: &Attributes<'_>) -> bool {
        let if_unknown = self.action == Action::Allow;
        self.rules.iter().any(|rule| {
            rule.iter().all(|clause| {
                clause.is_empty() || clause.iter().any(|one| one.holds(attributes, if_unknown))
            })
        })
    }
}

impl Match {
    /// Returns whether there are no conditions. Such a match never holds, so that a policy whose
    /// condition is not understood does not apply to every peer.
    fn is_empty(&self) -> bool {
        self.entries() == 0
    }

    fn entries(&self) -> usize {
        self.namespaces.len()
            + self.principals.len()
            + self.service_accounts.len()
            + self.source_ips.len()
            + self.destination_ips.len()
            + self.destination_ports.len()
    }

    fn holds(&self, attributes: &Attributes<'_>, unknown: bool) -> bool {
        let peer = attributes.peer;
        let namespace = peer.map_or("", |peer| peer.namespace);
        let principal = peer.and_then(|peer| peer.principal.strip_prefix("spiffe://"));
        let account = |(namespace, name): &(String, String)| {
            peer.is_some_and(|peer| peer.namespace == *namespace && peer.service_account == *name)
        };
        let within = |ip: IpAddr| move |net: &IpNet| net.contains(&ip.to_canonical());
        !self.is_empty()
            && self.source_ips.judge(attributes.source, unknown, |ip, net| within(ip)(net))
            && self.destination_ports.judge(attributes.port, unknown, |known, port| *port == known)
            && self.namespaces.holds(|one| one.matches(namespace))
            && self.principals.holds(|one| principal.is_some_and(|text| one.matches(text)))
            && self.service_accounts.holds(account)
            && self.destination_ips.holds(within(attributes.destination))
    }
}

/// Lists that are not empty, with the keys of ztunnel.
impl Serialize for Match {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        self.namespaces.put("namespaces", "notNamespaces", &mut map)?;
        self.principals.put("principals", "notPrincipals", &mut map)?;
        let accounts = |list: &[(String, String)]| {
            let account =
                |(namespace, name): &_| json!({ "namespace": namespace, "serviceAccount": name });
            list.iter().map(account).collect()
        };
        let Condition { any, none } = &self.service_accounts;
        let accounts = Condition { any: accounts(any), none: accounts(none) };
        accounts.put("serviceAccounts", "notServiceAccounts", &mut map)?;
        self.source_ips.put("sourceIps", "notSourceIps", &mut map)?;
        self.destination_ips.put("destinationIps", "notDestinationIps", &mut map)?;
        self.destination_ports.put("destinationPorts", "notDestinationPorts", &mut map)?;
        map.end()
    }
}

impl<T> Condition<T> {
    fn put<M: SerializeMap>(&self, any: &str, none: &str, map: &mut M) -> Result<(), M::Error>
    where
        T: Serialize,
    {
        let mut lists = [(any, &self.any), (none, &self.none)].into_iter();
        lists.try_for_each(|(key, list)| match list[..] {
            [] => Ok(()),
            _ => map.serialize_entry(key, list),
        })
    }

    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn len(&self) -> usize {
        self.any.len() + self.none.len()
    }

    /// Returns whether the condition holds for an attribute. If the attribute is unknown, a
    /// condition that is not empty yields `unknown`.
    fn judge<A: Copy>(
        &self,
        known: Option<A>,
        unknown: bool,
        hits: impl Fn(A, &T) -> bool,
    ) -> bool {
        let judged = known.map_or(unknown, |known| self.holds(|one| hits(known, one)));
        self.is_empty() || judged
    }

    fn holds(&self, hits: impl Fn(&T) -> bool) -> bool {
        (self.any.is_empty() || self.any.iter().any(&hits)) && !self.none.iter().any(&hits)
    }
}

impl<T> Default for Condition<T> {
    fn default() -> Self {
        Self { any: Vec::new(), none: Vec::new() }
    }
}

impl StringMatch {
    fn matches(&self, text: &str) -> bool {
        match self {
            Self::Exact(whole) => text == whole,
            Self::Prefix(start) => text.starts_with(start.as_str()),
            Self::Suffix(end) => text.ends_with(end.as_str()),
            Self::Presence() => !text.is_empty(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: Caller<'_> = Caller {
        trust_domain: "west.local",
        issuer: None,
        principal: "spiffe://west.local/ns/shop/sa/checkout",
        namespace: "shop",
        service_account: "checkout",
    };

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    fn attributes(peer: Option<Caller<'static>>) -> Attributes<'static> {
        Attributes {
            peer,
            source: Some(ip("::ffff:10.0.0.1")),
            destination: ip("10.1.0.1"),
            port: Some(8080),
        }
    }

    fn policy(rules: Vec<Rule>) -> Policy {
        Policy {
            name: "p".into(),
            namespace: "app".into(),
            scope: PolicyScope::Namespace,
            action: Action::Allow,
            rules,
            dry_run: false,
            unreadable: false,
        }
    }

    fn matches(one: Match) -> bool {
        policy(vec![vec![vec![one]]]).matches(&attributes(Some(PEER)))
    }

    fn any<T>(value: T) -> Condition<T> {
        Condition { any: vec![value], none: Vec::new() }
    }

    fn none<T>(value: T) -> Condition<T> {
        Condition { any: Vec::new(), none: vec![value] }
    }

    fn good() -> Match {
        Match { namespaces: any(StringMatch::Exact("shop".into())), ..Match::default() }
    }

    fn bad() -> Match {
        Match { namespaces: any(StringMatch::Exact("Shop".into())), ..Match::default() }
    }

    #[test]
    fn one_rule_all_clauses_one_match() {
        let cases = [
            (vec![], false),
            (vec![vec![]], true),
            (vec![vec![vec![]]], true),
            (vec![vec![vec![Match::default()]]], false),
            (vec![vec![vec![bad(), good()]]], true),
            (vec![vec![vec![good()], vec![bad()]]], false),
            (vec![vec![vec![bad()]], vec![]], true),
        ];
        for (rules, want) in cases {
            let policy = policy(rules);
            assert_eq!(policy.matches(&attributes(Some(PEER))), want, "{policy:?}");
        }
    }

    #[test]
    fn every_attribute_has_to_hold() {
        let both = Match { destination_ports: any(80), ..good() };
        assert!(!matches(both));
        for (hit, miss) in [
            (StringMatch::Exact("west.local/ns/shop/sa/checkout".into()), "spiffe://"),
            (StringMatch::Prefix("west.local/".into()), "west.local/ns/other"),
            (StringMatch::Suffix("/sa/checkout".into()), "/sa/other"),
            (StringMatch::Presence(), "\0"),
        ] {
            assert!(matches(Match { principals: any(hit.clone()), ..Match::default() }));
            assert!(!matches(Match { principals: none(hit), ..Match::default() }));
            let miss = StringMatch::Prefix(miss.into());
            assert!(!matches(Match { principals: any(miss), ..Match::default() }));
        }
        let account = |name: &str| ("shop".to_owned(), name.to_owned());
        let accounts = |name| Match { service_accounts: any(account(name)), ..Match::default() };
        assert!(matches(accounts("checkout")) && !matches(accounts("other")));
        let net = |text: &str| text.parse::<IpNet>().expect("a network");
        let source = |text| Match { source_ips: any(net(text)), ..Match::default() };
        assert!(matches(source("10.0.0.0/24")) && !matches(source("10.1.0.0/24")));
        let destination = |text| Match { destination_ips: none(net(text)), ..Match::default() };
        assert!(!matches(destination("10.1.0.0/24")) && matches(destination("10.0.0.0/24")));
    }

    #[test]
    fn of_what_is_not_known_an_allow_matches_and_a_deny_does_not() {
        let attributes = Attributes { source: None, port: None, ..attributes(Some(PEER)) };
        let of_port =
            |from: Match, ports: Condition<u16>| Match { destination_ports: ports, ..from };
        let of_source =
            |from: Match, source: Condition<IpNet>| Match { source_ips: source, ..from };
        // One network contains the address of the outer connection, the other does not.
        let nets = ["10.0.0.0/24", "10.9.0.0/24"].map(|text| text.parse().expect("a network"));
        let ports = [any(8080), none(8080)].map(|ports| {
            let both = |from| of_port(from, ports.clone());
            (both(good()), both(bad()))
        });
        let sources = nets.map(|net: IpNet| [any(net), none(net)]);
        let sources = sources.as_flattened().iter().map(|sources| {
            let both = |from| of_source(from, sources.clone());
            (both(good()), both(bad()))
        });
        for (with_good, with_bad) in ports.into_iter().chain(sources) {
            for (one, allows, denies) in [(with_good, true, false), (with_bad, false, false)] {
                let allow = policy(vec![vec![vec![one]]]);
                let deny = Policy { action: Action::Deny, ..allow.clone() };
                let got = (allow.matches(&attributes), deny.matches(&attributes));
                assert_eq!(got, (allows, denies), "{allow:?}");
            }
        }
    }

    #[test]
    fn without_an_identity_positive_conditions_fail_and_negative_ones_hold() {
        let presence = |condition: fn(StringMatch) -> Condition<StringMatch>| {
            let one = Match { principals: condition(StringMatch::Presence()), ..Match::default() };
            policy(vec![vec![vec![one]]]).matches(&attributes(None))
        };
        assert!(!presence(any));
        assert!(presence(none), "as PeerAuthentication STRICT has it");
    }

    #[test]
    fn everything_that_a_policy_has_counts() {
        let ports = |any: Vec<u16>, none: Vec<u16>| Match {
            destination_ports: Condition { any, none },
            ..good()
        };
        for (rules, size) in [
            (vec![], 0),
            (vec![vec![]; 3], 3),
            (vec![vec![vec![]; 3]], 4),
            (vec![vec![vec![Match::default(); 3]]], 5),
            (vec![vec![vec![ports(vec![1; 5], vec![2; 7])]]], 16),
        ] {
            assert_eq!(policy(rules).size(), size);
        }
    }

    #[test]
    fn the_placeholder_of_an_unreadable_policy_rejects_everything() {
        let policy =
            Policy::deny_all_unreadable("a".into(), "p".into(), PolicyScope::Global, false);
        assert_eq!(policy.action, Action::Deny);
        assert!(policy.matches(&attributes(Some(PEER))) && policy.matches(&attributes(None)));
    }

    #[test]
    fn a_policy_has_the_keys_of_ztunnel_and_only_those_that_say_something() {
        let of = Match {
            namespaces: Condition {
                any: vec![StringMatch::Exact("shop".into())],
                none: vec![StringMatch::Prefix("dev-".into())],
            },
            principals: Condition { any: Vec::new(), none: vec![StringMatch::Presence()] },
            service_accounts: Condition {
                any: vec![("shop".into(), "checkout".into())],
                none: Vec::new(),
            },
            source_ips: Condition {
                any: vec!["10.0.0.0/8".parse().expect("a network")],
                none: Vec::new(),
            },
            destination_ports: Condition { any: vec![80], none: Vec::new() },
            ..Match::default()
        };
        let policy = Policy {
            name: "p".into(),
            namespace: "app".into(),
            scope: PolicyScope::Selected,
            action: Action::Allow,
            rules: vec![vec![vec![of]]],
            dry_run: true,
            unreadable: false,
        };
        let shown = serde_json::to_value(&policy).expect("a value");
        let want = json!({
            "name": "p", "namespace": "app", "scope": "WorkloadSelector", "action": "Allow",
            "rules": [[[{
                "namespaces": [{"Exact": "shop"}], "notNamespaces": [{"Prefix": "dev-"}],
                "notPrincipals": [{"Presence": []}],
                "serviceAccounts": [{"namespace": "shop", "serviceAccount": "checkout"}],
                "sourceIps": ["10.0.0.0/8"], "destinationPorts": [80],
            }]]],
            "dryRun": true, "unreadable": false,
        });
        assert_eq!(shown, want);
    }
}
