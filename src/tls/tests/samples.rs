//! Authorities, certificates and identities of tests.

use std::sync::LazyLock;
use std::time::SystemTime;

use rcgen::SanType;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use crate::tls::{IdentityMaterial, PeerTrust, ServerTls, TrustedDomain, listener_server_config};
use crate::tools::dev::{Authority, Issuer, Leaf};

/// Identity of [`MATERIAL`].
pub(crate) const OWN: &str = "spiffe://east.local/ns/a/sa/b";

/// Identity of cluster east under a root of its own.
pub(crate) static MATERIAL: LazyLock<IdentityMaterial> = LazyLock::new(|| {
    let authority = authority();
    material(&leaf(&authority, "east", OWN), &authority.root_pem())
});

pub(crate) fn authority() -> Authority {
    Authority::new().expect("a root")
}

pub(crate) fn intermediate(authority: &Authority, name: &str) -> Issuer {
    authority.intermediate(name).expect("an intermediate")
}

/// Returns the certificate of a workload, by a new intermediate of this name.
pub(crate) fn leaf(authority: &Authority, issuer: &str, id: &str) -> Leaf {
    intermediate(authority, issuer).leaf(id).expect("a leaf")
}

/// Returns a certificate of a workload that is valid between two times.
pub(crate) fn leaf_between(issuer: &Issuer, id: &str, start: SystemTime, end: SystemTime) -> Leaf {
    let leaf = issuer.leaf_with(|params| {
        params.subject_alt_names = vec![SanType::URI(id.try_into().expect("a URI"))];
        params.not_before = start.into();
        params.not_after = end.into();
    });
    leaf.expect("a leaf")
}

pub(crate) fn certificates(pem: &str) -> Vec<CertificateDer<'static>> {
    let read = CertificateDer::pem_slice_iter(pem.as_bytes());
    read.collect::<Result<_, _>>().expect("certificates")
}

pub(crate) fn material(leaf: &Leaf, root: &str) -> IdentityMaterial {
    IdentityMaterial::from_pem(&leaf.chain_pem, &leaf.key_pem, root).expect("material")
}

pub(crate) fn domain(name: &str) -> TrustedDomain {
    TrustedDomain { name: name.into(), issuers: None, roots: None }
}

/// Returns the configuration of a gateway that trusts these domains.
pub(crate) fn trusting(own: &IdentityMaterial, domains: &[&str]) -> ServerTls {
    let domains = domains.iter().map(|name| domain(name)).collect();
    let trust = PeerTrust { domains, ..PeerTrust::default() };
    listener_server_config(own, &trust).expect("a configuration")
}
