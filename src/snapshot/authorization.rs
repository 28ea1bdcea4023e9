//! Authorization policies as plain data (Istio's L4 policies), and what they match.

use std::net::IpAddr;

use ipnet::IpNet;

/// A policy: what it covers, and what happens to what it matches.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// The name.
    pub name: String,
    /// The namespace.
    pub namespace: String,
    /// What it covers.
    pub scope: Scope,
    /// What happens to what it matches.
    pub action: Action,
    /// Its rules: it matches if one of them does, so without a rule it matches nothing.
    pub rules: Vec<Rule>,
    /// Whether it only logs.
    pub dry_run: bool,
    /// Whether it stands in for one that could not be read: it then refuses everything that it
    /// covers (contract 10).
    pub unreadable: bool,
}

/// What a policy covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Everything.
    Global,
    /// The workloads of its namespace.
    Namespace,
    /// The workloads that name it.
    Selected,
}

/// What happens to what a policy matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// It may go on.
    Allow,
    /// It is refused.
    Deny,
}

/// A rule matches if all of its clauses do, so without one it always does.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rule {
    /// The clauses.
    pub clauses: Vec<Clause>,
}

/// A clause matches if one of its matches does, and also if it has none.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Clause {
    /// The matches.
    pub matches: Vec<Match>,
}

/// Conditions that have to hold together; without any of them it never matches.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Match {
    /// The peer's namespace.
    pub namespaces: Condition<StringMatch>,
    /// The peer's identity without `spiffe://`.
    pub principals: Condition<StringMatch>,
    /// The peer's service account, as namespace and name.
    pub service_accounts: Condition<(String, String)>,
    /// The peer's address.
    pub source_ips: Condition<IpNet>,
    /// The endpoint's address.
    pub destination_ips: Condition<IpNet>,
    /// The endpoint's port.
    pub destination_ports: Condition<u16>,
}

/// Two lists about one attribute: it holds if the first is empty or has a hit, and the second has
/// none.
#[derive(Clone, Debug, PartialEq)]
pub struct Condition<T> {
    /// One of these has to hit.
    pub any: Vec<T>,
    /// None of these may hit.
    pub none: Vec<T>,
}

/// A condition on a text. Case counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StringMatch {
    /// It is this one.
    Exact(String),
    /// It begins so.
    Prefix(String),
    /// It ends so.
    Suffix(String),
    /// It is not empty.
    Presence,
}

/// Who asks, and for what, as far as it is known.
#[derive(Clone, Copy, Debug)]
pub struct Attributes<'a> {
    /// The peer's identity, if it has one.
    pub peer: Option<PeerIdentity<'a>>,
    /// The peer's address, where it is the one that the endpoint sees: that of a gateway is not.
    pub source: Option<IpAddr>,
    /// The endpoint's address.
    pub destination: IpAddr,
    /// The endpoint's port, where it is known: that of an inner CONNECT is not.
    pub port: Option<u16>,
}

/// The parts of a peer's identity.
#[derive(Clone, Copy, Debug)]
pub struct PeerIdentity<'a> {
    /// All of it, `spiffe://…`.
    pub principal: &'a str,
    /// The namespace.
    pub namespace: &'a str,
    /// The service account.
    pub service_account: &'a str,
}

impl Policy {
    /// A policy in the place of one that could not be read.
    pub fn unreadable(namespace: String, name: String, scope: Scope, dry_run: bool) -> Self {
        Self {
            name,
            namespace,
            scope,
            action: Action::Deny,
            rules: vec![Rule::default()],
            dry_run,
            unreadable: true,
        }
    }

    /// Its name as workloads write it, `namespace/name`.
    pub fn full_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// How many rules, clauses, matches and entries of their lists it has together.
    pub fn size(&self) -> usize {
        let clauses = || self.rules.iter().flat_map(|rule| &rule.clauses);
        let matches = || clauses().flat_map(|clause| &clause.matches);
        let entries: usize = matches().map(Match::entries).sum();
        self.rules.len() + clauses().count() + matches().count() + entries
    }

    /// Whether the policy matches.
    ///
    /// Of a source or a port that is not known an ALLOW is taken to match and a DENY not: what is
    /// refused is then what the destination, which knows them, would refuse whatever they are.
    pub fn matches(&self, attributes: &Attributes<'_>) -> bool {
        let unknown = self.action == Action::Allow;
        self.rules.iter().any(|rule| {
            rule.clauses.iter().all(|clause| {
                let matches = &clause.matches;
                matches.is_empty() || matches.iter().any(|one| one.holds(attributes, unknown))
            })
        })
    }
}

impl Match {
    /// Whether nothing is asked for. Such a match never holds, so that a policy of which a
    /// condition is not understood does not come to mean everybody.
    fn is_empty(&self) -> bool {
        self.entries() == 0
    }

    /// How many entries its lists have together.
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
            && self
                .source_ips
                .judge(attributes.source, unknown, |ip, net| within(ip)(net))
            && self
                .destination_ports
                .judge(attributes.port, unknown, |known, port| *port == known)
            && self.namespaces.holds(|one| one.hits(namespace))
            && self
                .principals
                .holds(|one| principal.is_some_and(|text| one.hits(text)))
            && self.service_accounts.holds(account)
            && self.destination_ips.holds(within(attributes.destination))
    }
}

impl<T> Condition<T> {
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn len(&self) -> usize {
        self.any.len() + self.none.len()
    }

    /// Whether it holds of an attribute; if that is not known, `unknown` is what is taken for the
    /// answer where one is asked for.
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
        Self {
            any: Vec::new(),
            none: Vec::new(),
        }
    }
}

impl StringMatch {
    fn hits(&self, text: &str) -> bool {
        match self {
            Self::Exact(whole) => text == whole,
            Self::Prefix(start) => text.starts_with(start.as_str()),
            Self::Suffix(end) => text.ends_with(end.as_str()),
            Self::Presence => !text.is_empty(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: PeerIdentity<'_> = PeerIdentity {
        principal: "spiffe://west.local/ns/shop/sa/checkout",
        namespace: "shop",
        service_account: "checkout",
    };

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    fn asked(peer: Option<PeerIdentity<'static>>) -> Attributes<'static> {
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
            scope: Scope::Namespace,
            action: Action::Allow,
            rules,
            dry_run: false,
            unreadable: false,
        }
    }

    fn clause(matches: Vec<Match>) -> Clause {
        Clause { matches }
    }

    fn rule(clauses: Vec<Clause>) -> Rule {
        Rule { clauses }
    }

    fn matches(one: Match) -> bool {
        policy(vec![rule(vec![clause(vec![one])])]).matches(&asked(Some(PEER)))
    }

    fn any<T>(value: T) -> Condition<T> {
        Condition {
            any: vec![value],
            none: Vec::new(),
        }
    }

    fn none<T>(value: T) -> Condition<T> {
        Condition {
            any: Vec::new(),
            none: vec![value],
        }
    }

    fn good() -> Match {
        Match {
            namespaces: any(StringMatch::Exact("shop".into())),
            ..Match::default()
        }
    }

    fn bad() -> Match {
        Match {
            namespaces: any(StringMatch::Exact("Shop".into())),
            ..Match::default()
        }
    }

    #[test]
    fn one_rule_all_clauses_one_match() {
        let cases = [
            (vec![], false),
            (vec![rule(vec![])], true),
            (vec![rule(vec![clause(vec![])])], true),
            (vec![rule(vec![clause(vec![Match::default()])])], false),
            (vec![rule(vec![clause(vec![bad(), good()])])], true),
            (
                vec![rule(vec![clause(vec![good()]), clause(vec![bad()])])],
                false,
            ),
            (vec![rule(vec![clause(vec![bad()])]), rule(vec![])], true),
        ];
        for (rules, want) in cases {
            let policy = policy(rules);
            assert_eq!(policy.matches(&asked(Some(PEER))), want, "{policy:?}");
        }
    }

    #[test]
    fn every_attribute_has_to_hold() {
        let both = Match {
            destination_ports: any(80),
            ..good()
        };
        assert!(!matches(both));
        for (hit, miss) in [
            (
                StringMatch::Exact("west.local/ns/shop/sa/checkout".into()),
                "spiffe://",
            ),
            (
                StringMatch::Prefix("west.local/".into()),
                "west.local/ns/other",
            ),
            (StringMatch::Suffix("/sa/checkout".into()), "/sa/other"),
            (StringMatch::Presence, "\0"),
        ] {
            assert!(matches(Match {
                principals: any(hit.clone()),
                ..Match::default()
            }));
            assert!(!matches(Match {
                principals: none(hit),
                ..Match::default()
            }));
            let miss = StringMatch::Prefix(miss.into());
            assert!(!matches(Match {
                principals: any(miss),
                ..Match::default()
            }));
        }
        let account = |name: &str| ("shop".to_owned(), name.to_owned());
        let accounts = |name| Match {
            service_accounts: any(account(name)),
            ..Match::default()
        };
        assert!(matches(accounts("checkout")) && !matches(accounts("other")));
        let net = |text: &str| text.parse::<IpNet>().expect("a network");
        let source = |text| Match {
            source_ips: any(net(text)),
            ..Match::default()
        };
        assert!(matches(source("10.0.0.0/24")) && !matches(source("10.1.0.0/24")));
        let destination = |text| Match {
            destination_ips: none(net(text)),
            ..Match::default()
        };
        assert!(!matches(destination("10.1.0.0/24")) && matches(destination("10.0.0.0/24")));
    }

    #[test]
    fn of_what_is_not_known_an_allow_matches_and_a_deny_does_not() {
        let asked = Attributes {
            source: None,
            port: None,
            ..asked(Some(PEER))
        };
        let of_port = |from: Match, ports: Condition<u16>| Match {
            destination_ports: ports,
            ..from
        };
        let of_source = |from: Match, source: Condition<IpNet>| Match {
            source_ips: source,
            ..from
        };
        // The addresses hit and miss what the outer connection comes from.
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
                let allow = policy(vec![rule(vec![clause(vec![one])])]);
                let deny = Policy {
                    action: Action::Deny,
                    ..allow.clone()
                };
                let got = (allow.matches(&asked), deny.matches(&asked));
                assert_eq!(got, (allows, denies), "{allow:?}");
            }
        }
    }

    #[test]
    fn without_an_identity_positive_conditions_fail_and_negative_ones_hold() {
        let presence = |condition: fn(StringMatch) -> Condition<StringMatch>| {
            let one = Match {
                principals: condition(StringMatch::Presence),
                ..Match::default()
            };
            policy(vec![rule(vec![clause(vec![one])])]).matches(&asked(None))
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
            (vec![rule(vec![]); 3], 3),
            (vec![rule(vec![clause(vec![]); 3])], 4),
            (vec![rule(vec![clause(vec![Match::default(); 3])])], 5),
            (
                vec![rule(vec![clause(vec![ports(vec![1; 5], vec![2; 7])])])],
                16,
            ),
        ] {
            assert_eq!(policy(rules).size(), size);
        }
    }

    #[test]
    fn what_stands_in_for_an_unreadable_policy_refuses_everything() {
        let policy = Policy::unreadable("a".into(), "p".into(), Scope::Global, false);
        assert_eq!(policy.action, Action::Deny);
        assert!(policy.matches(&asked(Some(PEER))) && policy.matches(&asked(None)));
    }
}
