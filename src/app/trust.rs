//! Trust set of the snapshot, and issuers of peers for the status page.

use std::sync::Arc;

use crate::admin::{IssuerRow, IssuerSource};
use crate::config::{Config, Examined};
use crate::datapath::DataPath;
use crate::snapshot::TrustSet;
use crate::tls::{Issuer, PeerTrust};

use super::inputs::Certificates;

/// Returns the trust set of a configuration, including the issuers in its files.
pub(super) fn set(config: &Config, loaded: &PeerTrust) -> TrustSet {
    let trust = &config.trust;
    let domains = trust.domains.iter();
    TrustSet::new(domains.map(|domain| (&*domain.name, &*domain.cluster)))
        .with_waypoints(trust.waypoints.iter().map(String::as_str))
        .with_any_domain(trust.skip_validation)
        .with_issuers(loaded.clusters(), loaded.rejects_unknown)
}

/// Returns a warning if the issuer of the gateway's certificate is not assigned to its cluster.
/// Peers of the cluster would then not be assigned to it either.
pub(super) fn own_issuer(
    examined: &Examined,
    certificates: Option<&Certificates>,
) -> Option<String> {
    let (material, loaded) = certificates?;
    let own = &examined.config.as_ref()?.gateway.cluster;
    if loaded.clusters.is_empty() {
        return None;
    }
    let Issuer { spki, subject } = material.as_ref()?.issuer()?;
    let place = match loaded.clusters.get(&spki) {
        Some(cluster) if cluster == own => return None,
        Some(cluster) => format!("is in cluster `{cluster}`"),
        None => "is in no cluster".to_owned(),
    };
    let at = examined.trust_place.as_ref();
    let at = at.map_or_else(String::new, |at| format!("{at}: "));
    Some(format!(
        "{at}warning: the issuer of the gateway's certificate, {spki} ({subject}), {place} of \
         `trust.clusters`, and this gateway is in `{own}`; write it there"
    ))
}

/// Returns the source of the issuers that the running gateway has seen, with their current
/// clusters.
pub(super) fn issuers(gateway: &Arc<DataPath>) -> IssuerSource {
    let gateway = Arc::clone(gateway);
    IssuerSource::new(move || {
        let seen = gateway.tls.issuers().into_iter();
        let snapshot = gateway.reader.load();
        seen.map(|seen| IssuerRow {
            spki: seen.issuer.spki.to_string(),
            subject: seen.issuer.subject.to_string(),
            cluster: snapshot
                .trust
                .issuer_cluster(&seen.issuer.spki)
                .map(ToOwned::to_owned),
            accepted: seen.accepted,
            refused: seen.refused,
        })
        .collect()
    })
}
