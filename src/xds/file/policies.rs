//! Authorization policies in the mesh file.

use ipnet::IpNet;

use super::{all, segment};
use crate::config::fields::Value;

/// A policy is checked for its form only: nothing enforces it yet.
pub(super) fn policy(value: Value<'_>) -> Option<()> {
    let mut fields = value.fields("policies[]")?;
    fields.need("name", "allow-shop").and_then(segment);
    fields.need("namespace", "app").and_then(segment);
    let scopes = ["Global", "Namespace", "WorkloadSelector"].map(|s| (s, ()));
    fields.need("scope", "Namespace").map(|v| v.choice(&scopes));
    fields
        .need("action", "Allow")
        .map(|v| v.choice(&[("Allow", ()), ("Deny", ())]));
    if let Some(rules) = fields.need("rules", "[[[{namespaces: [{Exact: shop}]}]]]") {
        let matches = rules.items().flat_map(Value::items).flat_map(Value::items);
        matches.for_each(policy_match);
    }
    fields.get("dryRun").map(Value::flag);
    fields.finish();
    Some(())
}

fn policy_match(value: Value<'_>) {
    let Some(mut fields) = value.fields("policies[].rules[][][]") else {
        return;
    };
    for key in ["namespaces", "notNamespaces", "principals", "notPrincipals"] {
        fields.get(key).map(|list| all(list, string_match));
    }
    for key in ["serviceAccounts", "notServiceAccounts"] {
        fields.get(key).map(|list| all(list, account_match));
    }
    for key in [
        "sourceIps",
        "notSourceIps",
        "destinationIps",
        "notDestinationIps",
    ] {
        let network = |text: &str| text.parse::<IpNet>().ok();
        let wanted = "a network in CIDR form, such as `10.0.0.0/8`";
        fields
            .get(key)
            .map(|list| all(list, |v| v.parsed(wanted, network)));
    }
    for key in ["destinationPorts", "notDestinationPorts"] {
        fields.get(key).map(|list| all(list, Value::port));
    }
    fields.finish();
}

/// `{Exact: x}`, or `!Exact x`, of which the parser leaves `x`.
fn string_match(value: Value<'_>) -> Option<()> {
    if !value.is_map() {
        return value.text().map(drop);
    }
    let mut fields = value.fields("policies[].rules[][][].StringMatch")?;
    for key in ["Exact", "Prefix", "Suffix"] {
        fields.get(key).map(Value::text);
    }
    fields.get("Presence");
    fields.finish();
    Some(())
}

fn account_match(value: Value<'_>) -> Option<()> {
    let mut fields = value.fields("policies[].rules[][][].serviceAccounts[]")?;
    fields.need("namespace", "shop").map(Value::text);
    fields.need("serviceAccount", "checkout").map(Value::text);
    fields.finish();
    Some(())
}
