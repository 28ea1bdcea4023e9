//! Trust set of the snapshot, and warnings about trust in peers.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use crate::config::{Config, Examined};
use crate::snapshot::TrustSet;
use crate::tls::{IdentityMaterial, Issuer, PeerTrust};
use crate::yaml::Finding;

/// Returns the trust set of a configuration, including the issuers in its files.
pub(super) fn set(config: &Config, loaded: &PeerTrust) -> TrustSet {
    let trust = &config.trust;
    let domains = trust.domains.iter();
    TrustSet::new(domains.map(|domain| (&*domain.name, &*domain.cluster)))
        .with_waypoints(trust.waypoints.iter().map(String::as_str))
        .with_gateways(trust.gateways.iter().map(String::as_str))
        .with_any_domain(trust.skip_validation)
        .with_issuers(loaded.clusters(), loaded.rejects_unknown)
        .with_domain_issuers(loaded.domains.iter().filter_map(|domain| {
            let issuers = domain.issuers.as_ref()?;
            Some((&*domain.name, Arc::clone(issuers)))
        }))
}

/// Returns a warning if the issuer of the gateway's certificate is not assigned to its cluster.
/// Peers of the cluster would then not be assigned to it either.
pub(super) fn own_issuer(
    examined: &Examined,
    own: Option<&IdentityMaterial>,
    trust: Option<&PeerTrust>,
) -> Option<Finding> {
    let clusters = &trust?.clusters;
    if clusters.is_empty() {
        return None;
    }
    let Issuer { spki, subject } = own?.issuer()?;
    let own = &examined.config.as_ref()?.gateway.cluster;
    let place = match clusters.get(&spki) {
        Some(cluster) if cluster == own => return None,
        Some(cluster) => format!("is in cluster `{cluster}`"),
        None => "is in no cluster".to_owned(),
    };
    let what = format!(
        "the issuer of the gateway's certificate, {spki} ({subject}), {place} of `trust.clusters`, \
         and this gateway is in `{own}`"
    );
    Some(Finding::warning(&examined.trust_place, what, "it there"))
}

/// Returns warnings about stale lists and about trusted roots without a list, if the
/// configuration refuses peers for them. They are not part of the inputs of a start, because a
/// running gateway logs them itself. Roots are not checked while a list does not exist on this
/// machine.
pub(super) fn revocation_warnings(
    path: &Path,
    examined: &Examined,
    own: Option<&IdentityMaterial>,
    trust: Option<&PeerTrust>,
) -> Vec<Finding> {
    let config = examined.trust.as_ref().and_then(|trust| trust.crl.as_ref());
    let (Some(config), Some(trust)) = (config, trust) else {
        return Vec::new();
    };
    let crls = trust.crls.iter();
    let stale = crls.flat_map(|crls| crls.refused_as_stale(SystemTime::now()));
    let mut warnings: Vec<_> = stale
        .map(|list| {
            let what = format!(
                "{list} is stale: peers of this issuer are refused; put a newer list there, or \
                 write `on_stale: accept`"
            );
            Finding::warning(&examined.place_of(&list.file, path), what, "")
        })
        .collect();
    if config.files.iter().any(|file| examined.is_absent(file)) {
        return warnings;
    }
    let first = config.files.first().map_or(path, PathBuf::as_path);
    let place = examined.place_of(first, path);
    let roots = trust.roots_without_crl(own).into_iter();
    warnings.extend(roots.map(|root| {
        let what = format!(
            "`trust.crl` has no list of the root {root}: peers below {root} are refused; add its \
             list, or write `on_missing: accept`"
        );
        Finding::warning(&place, what, "")
    }));
    warnings
}
