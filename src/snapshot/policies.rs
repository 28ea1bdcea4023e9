//! Authorization policies of Istio by their scope, and their evaluation for a tunnel.
//!
//! Policies are a separate part of the snapshot and are not resolved into endpoints. A change of a
//! policy therefore rebuilds no workload, and the other way round.

use std::collections::HashMap;
use std::sync::Arc;

use derive_more::Display;

use super::authorization::{Action, Attributes, Policy, PolicyScope};
use super::mesh::Workload;
pub use crate::config::Enforcement;

/// All policies by scope.
///
/// The default represents a source that has sent no policies yet, and rejects everything. Otherwise
/// a mesh that arrives before its policies would be open.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Policies {
    received: bool,
    global: Vec<Arc<Policy>>,
    by_namespace: HashMap<Box<str>, Vec<Arc<Policy>>>,
    by_name: HashMap<Box<str>, Arc<Policy>>,
}

/// Result of evaluating the policies of a workload for a tunnel.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// Reason for which the tunnel is rejected, if it is.
    pub refusal: Option<PolicyRejection>,
    /// Reason for which it would be rejected if dry-run policies were enforced.
    pub dry_run: Option<PolicyRejection>,
}

#[derive(Clone, Debug, Display, PartialEq)]
pub enum PolicyRejection {
    /// No policies have been received yet.
    #[display("authorization policies not received yet")]
    NotReceived,
    #[display("{}", denial(_0))]
    Denied(Arc<Policy>),
    /// ALLOW policies apply, and none of them matches; this is the first one.
    #[display("not allowed by any ALLOW policy, such as {:?}", _0.full_name())]
    NotAllowed(Arc<Policy>),
}

impl FromIterator<Arc<Policy>> for Policies {
    fn from_iter<T: IntoIterator<Item = Arc<Policy>>>(policies: T) -> Self {
        let mut all = Self { received: true, ..Self::default() };
        for policy in policies {
            match policy.scope {
                PolicyScope::Global => all.global.push(Arc::clone(&policy)),
                PolicyScope::Namespace => {
                    let namespace = policy.namespace.as_str().into();
                    let own = all.by_namespace.entry(namespace).or_default();
                    own.push(Arc::clone(&policy));
                }
                PolicyScope::Selected => {}
            }
            all.by_name.insert(policy.full_name().into(), policy);
        }
        all
    }
}

impl Policies {
    pub fn len(&self) -> usize {
        self.by_name.len()
    }

    /// Returns whether there are no policies.
    pub fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }

    /// Returns all policies in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Policy>> {
        self.by_name.values()
    }

    /// Returns a policy that the workload names and that does not exist. Such a name is ignored
    /// (docs/wire-contract.md 5.1).
    pub fn missing<'a>(&self, workload: &'a Workload) -> Option<&'a str> {
        workload.policies.iter().map(|name| &**name).find(|name| !self.by_name.contains_key(*name))
    }

    /// Evaluates the policies that apply to `workload` (docs/wire-contract.md 5.1): the global
    /// ones, those of its namespace, and those that it names.
    pub fn evaluate(&self, workload: &Workload, attributes: &Attributes<'_>) -> Verdict {
        if !self.received {
            return Verdict { refusal: Some(PolicyRejection::NotReceived), dry_run: None };
        }
        let in_force = self.of(workload).filter(|policy| !policy.dry_run);
        let refusal = rejection(in_force, attributes);
        let logs = self.of(workload).any(|policy| policy.dry_run);
        let dry_run = match refusal {
            None if logs => rejection(self.of(workload), attributes),
            _ => None,
        };
        Verdict { refusal, dry_run }
    }

    fn of<'a>(&'a self, workload: &'a Workload) -> impl Iterator<Item = &'a Arc<Policy>> + Clone {
        let named = workload.policies.iter();
        let namespace = self.by_namespace.get(&*workload.namespace);
        self.global
            .iter()
            .chain(namespace.into_iter().flatten())
            .chain(named.filter_map(|name| self.by_name.get(&**name)))
    }
}

/// Returns the reason for a rejection, if any. A matching DENY rejects. So does the absence of a
/// matching ALLOW if any ALLOW applies.
fn rejection<'a>(
    policies: impl Iterator<Item = &'a Arc<Policy>>,
    attributes: &Attributes<'_>,
) -> Option<PolicyRejection> {
    let (mut allows, mut is_allowed) = (None, false);
    for policy in policies {
        match policy.action {
            Action::Deny if policy.matches(attributes) => {
                return Some(PolicyRejection::Denied(Arc::clone(policy)));
            }
            Action::Deny => {}
            Action::Allow => {
                allows.get_or_insert(policy);
                is_allowed = is_allowed || policy.matches(attributes);
            }
        }
    }
    let first = allows.filter(|_| !is_allowed)?;
    Some(PolicyRejection::NotAllowed(Arc::clone(first)))
}

fn denial(policy: &Policy) -> String {
    let name = policy.full_name();
    if policy.unreadable {
        return format!("policy {name:?} is unreadable and denies everything in its scope");
    }
    format!("denied by policy {name:?}")
}

#[cfg(test)]
mod tests {
    use super::super::authorization::{Condition, Match, StringMatch};
    use super::super::mesh::Template;
    use super::super::trust::Caller;
    use super::*;

    fn policy(name: &str, scope: PolicyScope, action: Action, namespace: &str) -> Policy {
        let one = Match {
            namespaces: Condition {
                any: vec![StringMatch::Exact(namespace.to_owned())],
                none: Vec::new(),
            },
            ..Match::default()
        };
        Policy {
            name: name.to_owned(),
            namespace: "app".to_owned(),
            scope,
            action,
            rules: vec![vec![vec![one]]],
            dry_run: false,
            unreadable: false,
        }
    }

    fn judge(policies: &Policies, names: &[&str]) -> Verdict {
        let workload = Workload {
            template: Template {
                namespace: "app".into(),
                policies: names.iter().map(|&name| name.into()).collect(),
                ..Template::default()
            }
            .into(),
            ..Workload::default()
        };
        let attributes = Attributes {
            peer: Some(Caller {
                principal: "spiffe://west.local/ns/shop/sa/checkout",
                namespace: "shop",
                service_account: "checkout",
                ..Caller::UNKNOWN
            }),
            source: None,
            destination: [10, 0, 0, 2].into(),
            port: None,
        };
        policies.evaluate(&workload, &attributes)
    }

    fn policies(all: &[Policy]) -> Policies {
        all.iter().cloned().map(Arc::new).collect()
    }

    /// Returns the name of the policy that rejects, and whether it is a DENY.
    fn refused(verdict: &Verdict) -> Option<(&str, bool)> {
        match verdict.refusal.as_ref()? {
            PolicyRejection::NotReceived => Some(("", false)),
            PolicyRejection::Denied(policy) => Some((&policy.name, true)),
            PolicyRejection::NotAllowed(policy) => Some((&policy.name, false)),
        }
    }

    #[test]
    fn what_covers_a_workload_decides_and_a_deny_comes_before_an_allow() {
        use Action::{Allow, Deny};
        use PolicyScope::{Global, Namespace, Selected};
        let one = |scope, action, of| policy("p", scope, action, of);
        let two = |a: Policy, b: Policy| vec![a, Policy { name: "q".into(), ..b }];
        let elsewhere = |from: Policy| Policy { namespace: "other".to_owned(), ..from };
        let table = [
            (vec![], None),
            (vec![one(Global, Allow, "shop")], None),
            (vec![one(Global, Allow, "bank")], Some(("p", false))),
            (vec![one(Global, Deny, "shop")], Some(("p", true))),
            (vec![one(Global, Deny, "bank")], None),
            (vec![one(Namespace, Deny, "shop")], Some(("p", true))),
            (vec![elsewhere(one(Namespace, Deny, "shop"))], None),
            (vec![elsewhere(one(Global, Deny, "shop"))], Some(("p", true))),
            (vec![elsewhere(one(Selected, Deny, "shop"))], None),
            (vec![one(Selected, Deny, "shop")], Some(("p", true))),
            (two(one(Global, Allow, "bank"), one(Selected, Allow, "shop")), None),
            (two(one(Global, Allow, "shop"), one(Namespace, Deny, "shop")), Some(("q", true))),
        ];
        for (all, want) in table {
            let verdict = judge(&policies(&all), &["app/p", "app/q", "app/missing"]);
            assert_eq!(refused(&verdict), want, "{all:?}");
            assert_eq!(verdict.dry_run, None);
        }
        let selected = policies(&[one(Selected, Deny, "shop")]);
        assert_eq!(refused(&judge(&selected, &[])), None, "nothing selects it");
    }

    #[test]
    fn a_dry_run_refuses_nothing_and_tells_what_it_would() {
        let would = |action, of| {
            let one = policy("p", PolicyScope::Global, action, of);
            judge(&policies(&[Policy { dry_run: true, ..one }]), &[])
        };
        for (verdict, want) in [
            (would(Action::Deny, "shop"), true),
            (would(Action::Deny, "bank"), false),
            (would(Action::Allow, "bank"), true),
            (would(Action::Allow, "shop"), false),
        ] {
            assert_eq!(verdict.refusal, None);
            assert_eq!(verdict.dry_run.is_some(), want);
        }
    }

    #[test]
    fn before_a_source_has_sent_its_policies_everything_is_refused() {
        assert_eq!(judge(&Policies::default(), &[]).refusal, Some(PolicyRejection::NotReceived));
        assert_eq!(judge(&policies(&[]), &[]).refusal, None);
    }

    #[test]
    fn a_policy_that_is_named_and_not_there_is_reported() {
        let known = policies(&[policy("p", PolicyScope::Selected, Action::Deny, "shop")]);
        let workload = |names: &[&str]| Workload {
            template: Template {
                policies: names.iter().map(|&name| name.into()).collect(),
                ..Template::default()
            }
            .into(),
            ..Workload::default()
        };
        assert_eq!(known.missing(&workload(&["app/p"])), None);
        let workload = workload(&["app/p", "app/q"]);
        assert_eq!(known.missing(&workload), Some("app/q"));
    }
}
