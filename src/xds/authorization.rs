//! Conversion of Istio's authorization messages to policies.
//!
//! A partially understood policy could allow too much, so anything unknown rejects the whole
//! policy: fields, enum values, kinds of conditions, prefix lengths beyond the address, and
//! extensions. The extensions of a match narrow or widen it, and those of a policy can have any
//! effect, so neither can be skipped. ztunnel drops addresses with invalid lengths, which can leave
//! a list empty, and an empty list matches everything (docs/wire-contract.md 5.2). A value that no
//! connection can have, such as port 0, is valid and matches nothing.

use std::net::IpAddr;

use ipnet::IpNet;
use prost::Message as _;

use super::client::SHARED_PLACEHOLDER;
use super::convert::{At as _, each, ip, namespace, number, shown};
use super::unknown::{self, FieldKind, Shape};
use crate::grpc::security as proto;
use crate::grpc::security::string_match::MatchType;
use crate::snapshot::authorization::{Action, Condition, Match, Policy, PolicyScope, StringMatch};

const LEAF: FieldKind = FieldKind::Leaf;
static AUTHORIZATION: Shape = Shape(&[
    (1, "name", LEAF),
    (2, "namespace", LEAF),
    (3, "scope", LEAF),
    (4, "action", LEAF),
    (5, "rules", FieldKind::Repeated(&RULE)),
    (6, "dry_run", LEAF),
    (7, "extensions", LEAF),
]);
static RULE: Shape = Shape(&[(1, "clauses", FieldKind::Repeated(&CLAUSE))]);
static CLAUSE: Shape = Shape(&[(2, "matches", FieldKind::Repeated(&MATCH))]);
static MATCH: Shape = Shape(&[
    (1, "namespaces", FieldKind::Repeated(&STRING_MATCH)),
    (2, "not_namespaces", FieldKind::Repeated(&STRING_MATCH)),
    (3, "principals", FieldKind::Repeated(&STRING_MATCH)),
    (4, "not_principals", FieldKind::Repeated(&STRING_MATCH)),
    (5, "source_ips", FieldKind::Repeated(&ADDRESS)),
    (6, "not_source_ips", FieldKind::Repeated(&ADDRESS)),
    (7, "destination_ips", FieldKind::Repeated(&ADDRESS)),
    (8, "not_destination_ips", FieldKind::Repeated(&ADDRESS)),
    (9, "destination_ports", LEAF),
    (10, "not_destination_ports", LEAF),
    (11, "service_accounts", FieldKind::Repeated(&ACCOUNT)),
    (12, "not_service_accounts", FieldKind::Repeated(&ACCOUNT)),
    (13, "extensions", LEAF),
]);
static STRING_MATCH: Shape = Shape(&[
    (1, "exact", LEAF),
    (2, "prefix", LEAF),
    (3, "suffix", LEAF),
    (4, "presence", FieldKind::One(&EMPTY)),
]);
static ADDRESS: Shape = Shape(&[(1, "address", LEAF), (2, "length", LEAF)]);
static ACCOUNT: Shape = Shape(&[(1, "namespace", LEAF), (2, "service_account", LEAF)]);
static EMPTY: Shape = Shape(&[]);

/// Checks that every field of an encoded policy is known.
pub fn reject_unknown_fields(body: &[u8]) -> Result<(), String> {
    unknown::refuse(body, &AUTHORIZATION).at("authorization")
}

pub fn policy(from: proto::Authorization) -> Result<Policy, String> {
    let namespace = namespace(from.namespace).at("authorization.namespace")?;
    let scope = scope(from.scope)
        .ok_or_else(|| format!("authorization.scope: {} is unknown", from.scope))?;
    let action = match proto::Action::try_from(from.action) {
        Ok(proto::Action::Allow) => Action::Allow,
        Ok(proto::Action::Deny) => Action::Deny,
        Err(_) => return Err(format!("authorization.action: {} is unknown", from.action)),
    };
    reject_extensions(&from.extensions).at("authorization")?;
    let rules = each("authorization.rules", from.rules, |rule| {
        each(".clauses", rule.clauses, |clause| each(".matches", clause.matches, convert_match))
    })?;
    Ok(Policy {
        name: from.name,
        namespace,
        scope,
        action,
        rules,
        dry_run: from.dry_run,
        unreadable: false,
    })
}

/// Fields of a policy that tell what it covers. The others are skipped, whatever they hold.
#[derive(prost::Message)]
struct Head {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    namespace: String,
    #[prost(enumeration = "proto::Scope", tag = "3")]
    scope: i32,
    #[prost(bool, tag = "6")]
    dry_run: bool,
}

/// Returns what an encoded policy covers, and whether it is a dry run; none unless it is named
/// `NAMESPACE/NAME` and these fields can be read. The policy may be too large to be decoded whole.
pub(super) fn covered(body: &[u8], name: &str) -> Option<(PolicyScope, bool)> {
    let head = Head::decode(body).ok()?;
    // A mismatch of name makes the selector of the policy unreliable.
    let is_own = format!("{}/{}", head.namespace, head.name) == name;
    is_own.then(|| (scope(head.scope).unwrap_or(PolicyScope::Global), head.dry_run))
}

/// Converts a scope. Returns none for an unknown value.
fn scope(from: i32) -> Option<PolicyScope> {
    Some(match proto::Scope::try_from(from).ok()? {
        proto::Scope::Global => PolicyScope::Global,
        proto::Scope::Namespace => PolicyScope::Namespace,
        proto::Scope::WorkloadSelector => PolicyScope::Selected,
    })
}

fn convert_match(from: proto::Match) -> Result<Match, String> {
    reject_extensions(&from.extensions)?;
    /// The values of which one has to match, and those of which none may.
    macro_rules! condition {
        ($any:ident, $none:ident, $convert:expr) => {
            Condition {
                any: each(concat!(".", stringify!($any)), from.$any, $convert)?,
                none: each(concat!(".", stringify!($none)), from.$none, $convert)?,
            }
        };
    }
    // No connection has port 0, so port 0 replaces an invalid number and matches nothing.
    let port = |one| Ok(number(one));
    let account = |one: proto::ServiceAccountMatch| Ok((one.namespace, one.service_account));
    Ok(Match {
        namespaces: condition!(namespaces, not_namespaces, string_match),
        principals: condition!(principals, not_principals, string_match),
        service_accounts: condition!(service_accounts, not_service_accounts, account),
        source_ips: condition!(source_ips, not_source_ips, network),
        destination_ips: condition!(destination_ips, not_destination_ips, network),
        destination_ports: condition!(destination_ports, not_destination_ports, port),
    })
}

fn string_match(from: proto::StringMatch) -> Result<StringMatch, String> {
    Ok(match from.match_type {
        Some(MatchType::Exact(text)) => StringMatch::Exact(text),
        Some(MatchType::Prefix(text)) => StringMatch::Prefix(text),
        Some(MatchType::Suffix(text)) => StringMatch::Suffix(text),
        Some(MatchType::Presence(())) => StringMatch::Presence(),
        None => return Err("of an unknown kind".to_owned()),
    })
}

/// Converts an address range. An IPv4-mapped IPv6 range becomes an IPv4 range, because
/// addresses are compared in canonical form.
fn network(from: proto::Address) -> Result<IpNet, String> {
    /// Prefix length of `::ffff:0:0/96`.
    const MAPPED_BITS: u32 = 96;
    let mut ip = ip(&from.address).at(".address")?;
    let mut length = from.length;
    if from.address.len() == 16 && ip.is_ipv4() {
        match length.checked_sub(MAPPED_BITS) {
            Some(rest) => length = rest,
            None => {
                if let IpAddr::V4(v4) = ip {
                    ip = v4.to_ipv6_mapped().into();
                }
            }
        }
    }
    u8::try_from(length)
        .ok()
        .and_then(|length| IpNet::new(ip, length).ok())
        .ok_or_else(|| format!(".length: {}, want at most the bits of the address", from.length))
}

fn reject_extensions(from: &[proto::Extension]) -> Result<(), String> {
    from.first().map_or(Ok(()), |first| {
        let name = shown(&first.name);
        Err(format!(".extensions[0]: {name} is not supported"))
    })
}

/// Returns a policy that denies everything in its scope, as placeholder for the unreadable
/// policy of this name.
pub fn deny_all_placeholder(name: &str, scope: PolicyScope, dry_run: bool) -> Policy {
    let name = match name {
        SHARED_PLACEHOLDER => "(beyond the limits, or without a usable name)",
        name => name,
    };
    let (namespace, name) = name.split_once('/').unwrap_or(("", name));
    Policy::deny_all_unreadable(namespace.to_owned(), name.to_owned(), scope, dry_run)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn text(kind: MatchType) -> Vec<proto::StringMatch> {
        vec![proto::StringMatch { match_type: Some(kind) }]
    }

    fn range(bytes: &'static [u8], length: u32) -> Vec<proto::Address> {
        vec![proto::Address { address: Bytes::from_static(bytes), length }]
    }

    fn account(namespace: &str, name: &str) -> Vec<proto::ServiceAccountMatch> {
        vec![proto::ServiceAccountMatch {
            namespace: namespace.into(),
            service_account: name.into(),
        }]
    }

    fn with(one: proto::Match) -> proto::Authorization {
        let clause = proto::Clause { matches: vec![one] };
        proto::Authorization {
            name: "p".into(),
            namespace: "app".into(),
            rules: vec![proto::Rule::default(), proto::Rule { clauses: vec![clause] }],
            ..proto::Authorization::default()
        }
    }

    #[test]
    fn every_field_of_a_policy_is_read() {
        let one = proto::Match {
            namespaces: text(MatchType::Exact("a".into())),
            not_namespaces: text(MatchType::Prefix("b".into())),
            principals: text(MatchType::Suffix("c".into())),
            not_principals: text(MatchType::Presence(())),
            source_ips: range(&[10, 0, 0, 0], 8),
            not_source_ips: range(&[0xfd; 16], 128),
            destination_ips: range(b"\0\0\0\0\0\0\0\0\0\0\xff\xff\x0a\x01\0\0", 112),
            not_destination_ips: range(b"\0\0\0\0\0\0\0\0\0\0\xff\xff\0\0\0\0", 95),
            destination_ports: vec![80],
            not_destination_ports: vec![81],
            service_accounts: account("a", "b"),
            not_service_accounts: account("c", "d"),
            extensions: vec![],
        };
        let from = proto::Authorization {
            scope: proto::Scope::WorkloadSelector.into(),
            action: proto::Action::Deny.into(),
            dry_run: true,
            ..with(one)
        };
        let got = policy(from).expect("a policy");
        assert_eq!((got.name.as_str(), got.namespace.as_str()), ("p", "app"));
        assert_eq!((got.scope, got.action), (PolicyScope::Selected, Action::Deny));
        assert!(got.dry_run && !got.unreadable && got.rules[0].is_empty());
        let one = &got.rules[1][0][0];
        assert_eq!(one.namespaces.any, [StringMatch::Exact("a".into())]);
        assert_eq!(one.namespaces.none, [StringMatch::Prefix("b".into())]);
        assert_eq!(one.principals.any, [StringMatch::Suffix("c".into())]);
        assert_eq!(one.principals.none, [StringMatch::Presence()]);
        let nets = [
            &one.source_ips.any,
            &one.source_ips.none,
            &one.destination_ips.any,
            &one.destination_ips.none,
        ];
        let nets = nets.map(|list| list[0].to_string());
        assert_eq!((nets[0].as_str(), nets[2].as_str()), ("10.0.0.0/8", "10.1.0.0/16"));
        assert!(nets[1].starts_with("fdfd:") && nets[3].ends_with("/95"), "{nets:?}");
        assert_eq!((one.destination_ports.any[0], one.destination_ports.none[0]), (80, 81));
        assert_eq!(one.service_accounts.any, [("a".to_owned(), "b".to_owned())]);
        assert_eq!(one.service_accounts.none, [("c".to_owned(), "d".to_owned())]);
    }

    /// Positions for an unknown field: the path, and the field numbers that lead there from the
    /// outermost message.
    const PLACES: [(&str, &[u8]); 8] = [
        ("", &[]),
        (".rules[0]", &[5]),
        (".rules[0].clauses[0]", &[5, 1]),
        (".rules[0].clauses[0].matches[0]", &[5, 1, 2]),
        (".rules[0].clauses[0].matches[0].not_principals[0]", &[5, 1, 2, 4]),
        (".rules[0].clauses[0].matches[0].principals[0].presence", &[5, 1, 2, 3, 4]),
        (".rules[0].clauses[0].matches[0].source_ips[0]", &[5, 1, 2, 5]),
        (".rules[0].clauses[0].matches[0].not_service_accounts[0]", &[5, 1, 2, 12]),
    ];

    #[test]
    fn a_field_that_we_do_not_know_is_named_wherever_it_stands() {
        for (path, way) in PLACES {
            // Field 99 with the varint 1, wrapped in one message per field number.
            let mut body = vec![0x98, 0x06, 0x01];
            for number in way.iter().rev() {
                let length = u8::try_from(body.len()).expect("few bytes");
                body = [&[number << 3 | 2, length], &*body].concat();
            }
            let why = reject_unknown_fields(&body).expect_err(path);
            let want = format!("authorization{path}: unknown field 99");
            assert_eq!(why, want);
        }
        let why = reject_unknown_fields(&[0x2a, 0x02, 0x0a]).expect_err("truncated field");
        assert_eq!(why, "authorization.rules[0]: truncated field");
    }

    #[test]
    fn what_we_encode_has_only_fields_that_we_know() {
        use prost::Message;
        for (change, _) in WRONG_MATCHES {
            let mut one = proto::Match {
                namespaces: text(MatchType::Presence(())),
                principals: text(MatchType::Exact("a".into())),
                not_service_accounts: account("a", "b"),
                ..proto::Match::default()
            };
            change(&mut one);
            let body = with(one).encode_to_vec();
            assert_eq!(reject_unknown_fields(&body), Ok(()));
        }
    }

    /// Change to a valid message, and the expected error.
    type Wrong<T> = (fn(&mut T), &'static str);

    fn extension() -> Vec<proto::Extension> {
        vec![proto::Extension { name: "x".into(), config: None }]
    }

    const WRONG_POLICIES: [Wrong<proto::Authorization>; 4] = [
        (|p| p.namespace = "a/b".into(), "authorization.namespace: `a/b` has a slash"),
        (|p| p.scope = 9, "authorization.scope: 9 is unknown"),
        (|p| p.action = -1, "authorization.action: -1 is unknown"),
        (|p| p.extensions = extension(), "authorization.extensions[0]: `x` is not supported"),
    ];

    const WRONG_MATCHES: [Wrong<proto::Match>; 6] = [
        (|m| m.extensions = extension(), ".extensions[0]: `x` is not supported"),
        (
            |m| m.principals = vec![proto::StringMatch::default()],
            ".principals[0]: of an unknown kind",
        ),
        (|m| m.source_ips = range(&[1; 5], 8), ".source_ips[0].address: 5 bytes, want 4 or 16"),
        (|m| m.not_source_ips = range(&[], 0), ".not_source_ips[0].address: 0 bytes, want 4 or 16"),
        (
            |m| m.destination_ips = range(&[1; 4], 33),
            ".destination_ips[0].length: 33, want at most the bits of the address",
        ),
        (
            |m| m.not_destination_ips = range(&[1; 16], 300),
            ".not_destination_ips[0].length: 300, want at most the bits of the address",
        ),
    ];

    #[test]
    fn a_value_that_nothing_can_have_is_accepted_and_matches_nothing() {
        let one = proto::Match {
            destination_ports: vec![80, 0, 65536 + 81],
            not_destination_ports: vec![u32::MAX],
            service_accounts: account("", "b"),
            not_service_accounts: account("a", ""),
            ..proto::Match::default()
        };
        let mut from = with(one);
        from.name.clear();
        from.namespace.clear();
        let got = policy(from).expect("a policy");
        let one = &got.rules[1][0][0];
        assert_eq!(one.destination_ports.any, [80, 0, 0]);
        assert_eq!(one.destination_ports.none, [0]);
        assert_eq!(one.service_accounts.any, [(String::new(), "b".to_owned())]);
        assert_eq!(one.service_accounts.none, [("a".to_owned(), String::new())]);
    }

    #[test]
    fn a_policy_that_is_wrong_is_rejected_by_its_field() {
        for (change, want) in WRONG_POLICIES {
            let mut from = with(proto::Match::default());
            change(&mut from);
            assert_eq!(policy(from).expect_err(want), want);
        }
        for (change, want) in WRONG_MATCHES {
            let mut one = proto::Match::default();
            change(&mut one);
            let why = policy(with(one)).expect_err(want);
            assert_eq!(why, format!("authorization.rules[1].clauses[0].matches[0]{want}"));
        }
    }
}
