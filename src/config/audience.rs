//! Peers that may use a service or a binding.

use serde_json::json;

use super::define::{Account, NonEmpty, Segment, section};
use crate::yaml::Value;

section! {
    /// Peers that a service is exposed to. At least one key is given.
    pub struct Audience at "exposure.services[].to[]" | "bindings[].to[]" |
        "exposure.bindings.to[]" or default, derive(Eq, Hash), check(check_audience)
    {
        /// Every peer of the trust set and, on TLS listeners, every client. No other key is given
        /// then.
        anyone: bool = default(false)
            unless json!({"anyOf": [{"required": ["cluster"]}, {"required": ["namespaces"]},
                {"required": ["service_accounts"]}]});
        /// Peers of this cluster, which `trust` names.
        cluster: Option<String> = default(None, "every cluster");
        /// Peers of these namespaces.
        namespaces: Vec<String> as NonEmpty<Segment> = default(Vec::new(), "every namespace");
        /// Peers with these service accounts.
        service_accounts: Vec<(String, String)> as NonEmpty<Account> = default(
            Vec::new(), "every service account");
    }
}

fn check_audience(audience: Audience, value: Value<'_>) -> Option<Audience> {
    let Audience { cluster, namespaces, service_accounts, .. } = &audience;
    let is_named = cluster.is_some() || !namespaces.is_empty() || !service_accounts.is_empty();
    if audience.anyone == is_named {
        let (what, how) = if is_named {
            let what = "has `anyone: true` next to other keys, which would have no effect";
            (what, "either `{anyone: true}` or the other keys")
        } else {
            let how = "`{anyone: true}` to admit every peer, or remove it to admit nobody";
            ("admits nobody", how)
        };
        value.error(what, how);
    }
    let place = value.path_among(Audience::PATHS);
    let items = value.at(place, "service_accounts").entries();
    for ((namespace, name), item) in service_accounts.iter().zip(items) {
        if !namespaces.is_empty() && !namespaces.contains(namespace) {
            let what = format!(
                "has `{namespace}/{name}`, whose namespace is not in `namespaces`: all keys of an \
                 entry must hold, so no peer has it"
            );
            let how = format!("`{namespace}` into `namespaces`, or remove `namespaces`");
            item.error(what, how);
        }
    }
    Some(audience)
}
