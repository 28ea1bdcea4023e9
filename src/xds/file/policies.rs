//! Authorization policies in the mesh file.

use ipnet::IpNet;

use super::segment;
use crate::snapshot::authorization::{
    Action, Condition, Match, Policy, PolicyScope, Rule, StringMatch,
};
use crate::yaml::{Fields, Value};

/// Reads a policy. The levels of `rules[][][]` are rules, clauses and matches.
pub(super) fn policy(value: Value<'_>) -> Option<Policy> {
    let mut fields = value.fields("policies[]")?;
    let name = fields.required("name", "allow-shop", segment);
    let namespace = fields.required("namespace", "app", segment);
    let scopes = [
        ("Global", PolicyScope::Global),
        ("Namespace", PolicyScope::Namespace),
        ("WorkloadSelector", PolicyScope::Selected),
    ];
    let scope = fields.need("scope", "Namespace");
    let scope = scope.and_then(|v| v.choice(&scopes));
    let actions = [("Allow", Action::Allow), ("Deny", Action::Deny)];
    let action = fields.need("action", "Allow");
    let action = action.and_then(|v| v.choice(&actions));
    let example = "[[[{namespaces: [{Exact: shop}]}]]]";
    let rules = fields.required("rules", example, |list| list.all(rule));
    let dry_run = fields.optional("dryRun", false, Value::flag);
    let policy = scope.zip(action).map(|(scope, action)| Policy {
        name,
        namespace,
        scope,
        action,
        rules,
        dry_run,
        unreadable: false,
    });
    fields.complete(policy).flatten()
}

fn rule(value: Value<'_>) -> Option<Rule> {
    value.all(|clause| clause.all(one_match))
}

fn one_match(value: Value<'_>) -> Option<Match> {
    let mut fields = value.fields("policies[].rules[][][]")?;
    let own = &mut fields;
    let one = Match {
        namespaces: condition(own, "namespaces", "notNamespaces", string_match),
        principals: condition(own, "principals", "notPrincipals", string_match),
        service_accounts: condition(own, "serviceAccounts", "notServiceAccounts", account),
        source_ips: condition(own, "sourceIps", "notSourceIps", network),
        destination_ips: condition(own, "destinationIps", "notDestinationIps", network),
        destination_ports: condition(own, "destinationPorts", "notDestinationPorts", Value::port),
    };
    fields.complete(one)
}

/// Reads the two lists of an attribute. A missing key is an empty list.
fn condition<'a, T>(
    fields: &mut Fields<'a>,
    any: &'static str,
    none: &'static str,
    read: impl Fn(Value<'a>) -> Option<T>,
) -> Condition<T> {
    let mut list = |key| fields.optional(key, Vec::new(), |list| list.all(&read));
    Condition { any: list(any), none: list(none) }
}

fn network(value: Value<'_>) -> Option<IpNet> {
    let wanted = "a network in CIDR form, such as `10.0.0.0/8`";
    value.parsed(wanted, |text| text.parse().ok())
}

/// Reads `{Exact: x}`. The YAML parser drops tags such as `!Prefix`, so a plain text would be
/// ambiguous.
fn string_match(value: Value<'_>) -> Option<StringMatch> {
    let place = "policies[].rules[][][].StringMatch";
    let mut fields = value.fields(place)?;
    let mut text = |key, of: fn(String) -> StringMatch| {
        let value = fields.get(key)?;
        Some(value.text().map(|text| of(text.to_owned())))
    };
    let found = [
        text("Exact", StringMatch::Exact),
        text("Prefix", StringMatch::Prefix),
        text("Suffix", StringMatch::Suffix),
        fields.get("Presence").map(|_| Some(StringMatch::Presence())),
    ];
    drop(fields);
    let mut found = found.into_iter().flatten();
    match (found.next(), found.next()) {
        (Some(one), None) => one,
        _ => {
            value.error(
                "needs exactly one match type",
                "`{Exact: shop}`, or one of `Prefix`, `Suffix` and `Presence`",
            );
            None
        }
    }
}

fn account(value: Value<'_>) -> Option<(String, String)> {
    let mut fields = value.fields("policies[].rules[][][].serviceAccounts[]")?;
    let text = |value: Value<'_>| value.text().map(str::to_owned);
    let namespace = fields.required("namespace", "shop", text);
    let name = fields.required("serviceAccount", "checkout", text);
    fields.complete((namespace, name))
}
