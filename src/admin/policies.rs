//! Authorization policies in the format of ztunnel's dump.

use serde::Serialize;
use serde_json::{Value, json};

use crate::snapshot::authorization::{self, Action, Condition, Match, PolicyScope, StringMatch};

/// Policy.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Policy<'a> {
    name: &'a str,
    namespace: &'a str,
    scope: &'static str,
    action: &'static str,
    /// A policy matches if one of its rules matches, a rule if all of its clauses match, a clause
    /// if one of its matches does.
    rules: Vec<Vec<Vec<Value>>>,
    dry_run: bool,
    /// True if it replaces a policy that could not be read. istioctl does not know this key.
    unreadable: bool,
}

impl<'a> Policy<'a> {
    pub(super) fn of(policy: &'a authorization::Policy) -> Self {
        let clause =
            |clause: &authorization::Clause| clause.matches.iter().map(match_to_json).collect();
        let rule = |rule: &authorization::Rule| rule.clauses.iter().map(clause).collect();
        Self {
            name: &policy.name,
            namespace: &policy.namespace,
            scope: match policy.scope {
                PolicyScope::Global => "Global",
                PolicyScope::Namespace => "Namespace",
                PolicyScope::Selected => "WorkloadSelector",
            },
            action: match policy.action {
                Action::Allow => "Allow",
                Action::Deny => "Deny",
            },
            rules: policy.rules.iter().map(rule).collect(),
            dry_run: policy.dry_run,
            unreadable: policy.unreadable,
        }
    }
}

/// Converts a match. Empty lists are omitted.
fn match_to_json(of: &Match) -> Value {
    let mut fields = serde_json::Map::new();
    let mut put = |name: &str, not: &str, (any, none): (Vec<Value>, Vec<Value>)| {
        for (name, list) in [(name, any), (not, none)] {
            if !list.is_empty() {
                fields.insert(name.to_owned(), list.into());
            }
        }
    };
    put("namespaces", "notNamespaces", values(&of.namespaces, text));
    put("principals", "notPrincipals", values(&of.principals, text));
    let accounts = values(&of.service_accounts, account);
    put("serviceAccounts", "notServiceAccounts", accounts);
    let sources = values(&of.source_ips, |net| json!(net));
    put("sourceIps", "notSourceIps", sources);
    let destinations = values(&of.destination_ips, |net| json!(net));
    put("destinationIps", "notDestinationIps", destinations);
    let ports = values(&of.destination_ports, |port| json!(port));
    put("destinationPorts", "notDestinationPorts", ports);
    Value::Object(fields)
}

fn account((namespace, name): &(String, String)) -> Value {
    json!({ "namespace": namespace, "serviceAccount": name })
}

fn values<T>(condition: &Condition<T>, shown: impl Fn(&T) -> Value) -> (Vec<Value>, Vec<Value>) {
    let list = |of: &[T]| of.iter().map(&shown).collect();
    (list(&condition.any), list(&condition.none))
}

fn text(of: &StringMatch) -> Value {
    match of {
        StringMatch::Exact(text) => json!({ "Exact": text }),
        StringMatch::Prefix(text) => json!({ "Prefix": text }),
        StringMatch::Suffix(text) => json!({ "Suffix": text }),
        StringMatch::Presence => json!({ "Presence": [] }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::authorization::{Clause, Rule};

    #[test]
    fn a_policy_has_the_keys_of_ztunnel_and_only_those_that_say_something() {
        let of = Match {
            namespaces: Condition {
                any: vec![StringMatch::Exact("shop".into())],
                none: vec![StringMatch::Prefix("dev-".into())],
            },
            principals: Condition {
                any: Vec::new(),
                none: vec![StringMatch::Presence],
            },
            service_accounts: Condition {
                any: vec![("shop".into(), "checkout".into())],
                none: Vec::new(),
            },
            source_ips: Condition {
                any: vec!["10.0.0.0/8".parse().expect("a network")],
                none: Vec::new(),
            },
            destination_ports: Condition {
                any: vec![80],
                none: Vec::new(),
            },
            ..Match::default()
        };
        let policy = authorization::Policy {
            name: "p".into(),
            namespace: "app".into(),
            scope: PolicyScope::Selected,
            action: Action::Allow,
            rules: vec![Rule {
                clauses: vec![Clause { matches: vec![of] }],
            }],
            dry_run: true,
            unreadable: false,
        };
        let shown = serde_json::to_value(Policy::of(&policy)).expect("JSON");
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
