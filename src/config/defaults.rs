//! What is in force where nobody says anything, as it would be written.

use super::{ADMIN, CERTIFICATE_TTL, DRAIN_DEADLINE, DRAIN_LAG, METRICS, READINESS, TRUST_DOMAIN};
use crate::yaml::{Kind, Node};

/// What a line of a default says of its origin.
pub(super) const ORIGIN: &str = "the default";

/// A section and its keys with their values in YAML; a section that is one value has the key ``.
pub(super) type Section = (&'static str, Vec<(&'static str, String)>);

/// All that a document does not say itself, by section.
pub(super) fn missing(root: &Node) -> Vec<Section> {
    let mut sections = all(root);
    for (name, keys) in &mut sections {
        let said = root.get(name);
        keys.retain(|(key, _)| match key.is_empty() {
            true => said.is_none(),
            // What is no map is a mistake, and has a finding.
            false => said.is_none_or(|section| {
                matches!(section.kind, Kind::Map(_)) && section.get(key).is_none()
            }),
        });
    }
    sections
}

fn all(root: &Node) -> Vec<Section> {
    let plain = |value: &str| value.to_owned();
    let quoted = |value: &dyn ToString| serde_json::Value::from(value.to_string()).to_string();
    let time = |time| quoted(&humantime::format_duration(time));
    let cluster = root
        .get("gateway")
        .and_then(|gateway| gateway.get("cluster"));
    let network = cluster.and_then(|cluster| match &cluster.kind {
        Kind::Text(text) => Some(super::layers::scalar(text)),
        _ => None,
    });
    let network = network.map(|network| ("network", network));
    let identity = root
        .get("identity")
        .and_then(|identity| identity.word("kind"));
    let of_authority = match identity {
        Some("istio-ca") => vec![
            ("trust_domain", plain(TRUST_DOMAIN)),
            ("ttl", time(CERTIFICATE_TTL)),
        ],
        _ => Vec::new(),
    };
    let mut of_trust = vec![("skip_validation", plain("false"))];
    let clusters = root.get("trust").and_then(|trust| trust.get("clusters"));
    of_trust.extend(clusters.map(|_| ("unknown_issuers", plain("accept"))));
    vec![
        ("gateway", network.into_iter().collect()),
        ("identity", of_authority),
        (
            "exposure",
            vec![("default", plain("none")), ("services", plain("[]"))],
        ),
        ("trust", of_trust),
        ("policy", vec![("istio", quoted(&"off"))]),
        ("dns", vec![("servers", plain("[]"))]),
        ("dial", vec![("allow", plain("[]"))]),
        ("workers", vec![("", plain("0"))]),
        ("admin", vec![("bind", quoted(&ADMIN))]),
        ("metrics", vec![("bind", quoted(&METRICS))]),
        ("readiness", vec![("bind", quoted(&READINESS))]),
        (
            "drain",
            vec![("lag", time(DRAIN_LAG)), ("deadline", time(DRAIN_DEADLINE))],
        ),
        (
            "log",
            vec![
                ("level", plain("info")),
                ("access", plain("all")),
                ("format", plain("text")),
            ],
        ),
    ]
}
