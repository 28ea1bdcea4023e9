//! Servers of endpoints in other networks: the certificates that tunnels require, and endpoints
//! that can present none of them.

use std::time::SystemTime;

use crate::outer::{ExpectedWorkloads, Failure, ServerIdentity};
use crate::reason::Reason;
use crate::snapshot::{Endpoint, RemoteGateway, Snapshot};
use crate::tls::Identity;

pub(super) fn describe_gateway(remote: &RemoteGateway) -> String {
    let (cluster, identities) = (&remote.cluster, remote.identities.join(" or "));
    match (identities.is_empty(), cluster.is_empty()) {
        (true, true) => "that cannot be accepted: its cluster is unknown".to_owned(),
        (true, false) => format!("of cluster {cluster}"),
        (false, true) => identities,
        (false, false) => format!("{identities} of cluster {cluster}"),
    }
}

/// Describes the certificates that are accepted from the workload behind a gateway.
pub(super) fn describe_workload(expected: &ExpectedWorkloads, cluster: &str) -> String {
    let identities = expected.identities.iter().cloned();
    let namespaces = expected.namespaces.iter();
    let namespaces = namespaces.map(|namespace| format!("any of namespace {namespace}"));
    let list: Vec<_> = identities.chain(namespaces).collect();
    if list.is_empty() {
        return format!("of cluster {cluster}");
    }
    format!("{} of cluster {cluster}", list.join(" or "))
}

/// Checks that the gateway of an endpoint, and the workload behind it if there is one, can have a
/// certificate that tunnels accept. Servers without configured identities can.
///
/// # Errors
/// The failure of each tunnel to the endpoint.
pub(super) fn check(
    snapshot: &Snapshot,
    endpoint: &Endpoint,
    expected: Option<&ExpectedWorkloads>,
) -> Result<(), Failure> {
    let Some(remote) = &endpoint.remote else {
        return Ok(());
    };
    let checked =
        check_any(snapshot, &remote.identities, |server| server.check_gateway(remote, snapshot));
    let checked = checked.and_then(|()| match remote.is_verifiable() {
        true => Ok(()),
        false => Err("neither its cluster nor an identity is known".to_owned()),
    });
    checked.map_err(|detail| Failure {
        reason: Reason::GatewayUntrusted,
        detail: format!("no certificate of the gateway can be accepted: {detail}"),
    })?;
    let Some(expected) = expected.filter(|expected| expected.namespaces.is_empty()) else {
        return Ok(());
    };
    let cluster = (&*endpoint.definition.cluster, snapshot);
    let checked = check_any(snapshot, &expected.identities, |server| {
        server.check_workload(expected, cluster)
    });
    checked.map_err(|detail| Failure {
        reason: Reason::WorkloadUntrusted,
        detail: format!("no certificate of the workload can be accepted: {detail}"),
    })
}

/// Checks a certificate of each identity by each issuer that may sign for it, until one passes.
fn check_any(
    snapshot: &Snapshot,
    identities: &[impl AsRef<str>],
    check: impl Fn(ServerIdentity<'_>) -> Result<(), String>,
) -> Result<(), String> {
    let mut checked = Ok(());
    let parse = |uri: &str| Identity::parse(uri, SystemTime::UNIX_EPOCH);
    for identity in identities.iter().filter_map(|uri| parse(uri.as_ref())) {
        let permitted = snapshot.trust.domain_issuers(&identity.trust_domain);
        let issuers = snapshot.trust.issuers().map(|(_, spki)| spki);
        let issuers = issuers.filter(|spki| permitted.is_none_or(|list| list.contains(*spki)));
        // `None` is an issuer outside `trust.clusters`.
        for issuer in issuers.map(Some).chain([None]) {
            let identity = &identity;
            match check(ServerIdentity { identity, issuer }) {
                Ok(()) => return Ok(()),
                difference => checked = checked.and(difference),
            }
        }
    }
    checked
}
