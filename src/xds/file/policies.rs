//! Authorization policies in the mesh file.

use ipnet::IpNet;

use super::{all, need, or, segment};
use crate::snapshot::authorization::{
    Action, Clause, Condition, Match, Policy, PolicyScope, Rule, StringMatch,
};
use crate::yaml::{Fields, Value};

/// Reads a policy. The levels of `rules[][][]` are rules, clauses and matches.
pub(super) fn policy(value: Value<'_>) -> Option<Policy> {
    let mut top = value.fields("policies[]")?;
    let fields = &mut top;
    let name = need(fields, "name", "allow-shop", segment);
    let namespace = need(fields, "namespace", "app", segment);
    let scopes = [
        ("Global", PolicyScope::Global),
        ("Namespace", PolicyScope::Namespace),
        ("WorkloadSelector", PolicyScope::Selected),
    ];
    let scope = need(fields, "scope", "Namespace", |v| v.choice(&scopes));
    let actions = [("Allow", Action::Allow), ("Deny", Action::Deny)];
    let action = need(fields, "action", "Allow", |v| v.choice(&actions));
    let example = "[[[{namespaces: [{Exact: shop}]}]]]";
    let rules = need(fields, "rules", example, |list| all(list, rule));
    let dry_run = or(fields, "dryRun", false, Value::flag);
    top.finish();
    Some(Policy {
        name: name?,
        namespace: namespace?,
        scope: scope?,
        action: action?,
        rules: rules?,
        dry_run: dry_run?,
        unreadable: false,
    })
}

fn rule(value: Value<'_>) -> Option<Rule> {
    let clauses = all(value, |value| {
        let matches = all(value, one_match)?;
        Some(Clause { matches })
    })?;
    Some(Rule { clauses })
}

fn one_match(value: Value<'_>) -> Option<Match> {
    let mut fields = value.fields("policies[].rules[][][]")?;
    let namespaces = condition(&mut fields, "namespaces", "notNamespaces", string_match);
    let principals = condition(&mut fields, "principals", "notPrincipals", string_match);
    let accounts = condition(
        &mut fields,
        "serviceAccounts",
        "notServiceAccounts",
        account,
    );
    let sources = condition(&mut fields, "sourceIps", "notSourceIps", network);
    let destinations = condition(&mut fields, "destinationIps", "notDestinationIps", network);
    let (any, none) = ("destinationPorts", "notDestinationPorts");
    let ports = condition(&mut fields, any, none, Value::port);
    fields.finish();
    Some(Match {
        namespaces: namespaces?,
        principals: principals?,
        service_accounts: accounts?,
        source_ips: sources?,
        destination_ips: destinations?,
        destination_ports: ports?,
    })
}

/// Reads the two lists of an attribute. A missing key is an empty list.
fn condition<'a, T>(
    fields: &mut Fields<'a>,
    any: &'static str,
    none: &'static str,
    read: impl Fn(Value<'a>) -> Option<T>,
) -> Option<Condition<T>> {
    let mut list = |key| or(fields, key, Vec::new(), |list| all(list, &read));
    let (any, none) = (list(any), list(none));
    Some(Condition {
        any: any?,
        none: none?,
    })
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
        fields.get("Presence").map(|_| Some(StringMatch::Presence)),
    ];
    fields.finish();
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
    let namespace = need(&mut fields, "namespace", "shop", Value::text);
    let name = need(&mut fields, "serviceAccount", "checkout", Value::text);
    fields.finish();
    Some((namespace?.to_owned(), name?.to_owned()))
}
