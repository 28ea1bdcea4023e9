//! The `identity` section, and the one strict parser of identities, for certificates and the
//! configuration.

use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;
use serde_json::{Value as Json, json};
use spiffe::{SpiffeId, TrustDomain as SpiffeTrustDomain};

use super::define::{
    Credential, NewFolder, Segment, Shape, TEXT, Ttl, Type, form, matching, path, section,
};
use super::discovery::{ControlPlane, ReadKeys, read_kind};
use crate::yaml::Value;

/// Default of `identity.trust_domain`, Istio's.
pub const TRUST_DOMAIN: &str = "cluster.local";

/// Default of `identity.ttl`, Istio's `SECRET_TTL`. Istio's authority rejects requests for longer
/// lifetimes than it allows, rather than to shorten them (docs/wire-contract.md 4.3).
pub const CERTIFICATE_TTL: Duration = Duration::from_secs(24 * 60 * 60);

/// Bytes of the longest SPIFFE id (SPIFFE-ID section 2.3).
const ID_BYTES_MAX: usize = 2048;

/// Source of the gateway's certificate.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Identity {
    /// Files, which are watched.
    Files(IdentityFiles),
    /// Istio's certificate authority, which signs for a key of the gateway.
    IstioCa(IstioCa),
    /// A SPIFFE Workload API, which has the key as well.
    Spiffe(WorkloadApi),
}

section! {
    /// A certificate in files.
    pub struct IdentityFiles at "identity" {
        /// PEM file with the leaf and its intermediates. The leaf has one URI SAN,
        /// `spiffe://DOMAIN/ns/NAMESPACE/sa/ACCOUNT`.
        chain: PathBuf as Credential = required("certs/gateway.crt");
        /// PEM file with the private key of the leaf.
        key: PathBuf as Credential = required("certs/gateway.key");
        /// PEM file with the roots by which peers are verified.
        roots: PathBuf as Credential = required("certs/root.crt");
    }
}

section! {
    /// A certificate that Istio's authority signs, for the identity
    /// `spiffe://TRUST-DOMAIN/ns/NAMESPACE/sa/ACCOUNT`.
    pub struct IstioCa at "identity" {
        /// The authority.
        plane: ControlPlane = flatten(ControlPlane::read_keys);
        /// Trust domain of the certificate, which has to be that of the token.
        trust_domain: String as DomainName = default(TRUST_DOMAIN.to_owned());
        /// Namespace of the certificate, which has to be that of the token.
        namespace: Option<String> as Option<Segment> = default(None, "`POD_NAMESPACE`");
        /// Service account of the certificate, which has to be that of the token.
        service_account: Option<String> as Option<Segment> = default(
            None, "`SERVICE_ACCOUNT` or `ISTIO_META_SERVICE_ACCOUNT`");
        /// Requested lifetime. The certificate is replaced at half of it. The authority rejects
        /// more than it allows.
        ttl: Duration as Ttl = default(CERTIFICATE_TTL);
        /// Directory for key and certificate, in a tmpfs, for a restart without the authority. It
        /// is created with mode 0700. One of another user or open to others is ignored with a
        /// warning, as is a file in it with a mode other than 0600. The file is used until the
        /// certificate expires, for the same identity, while each root of `identity.roots` at its
        /// issue is still there. An expired certificate is removed within 15 s, or at the start.
        cache: Option<PathBuf> as Option<NewFolder> = default(None, "nothing is stored");
    }
}

section! {
    /// A certificate of a SPIFFE Workload API.
    pub struct WorkloadApi at "identity" {
        /// Socket of the Workload API.
        socket: Option<PathBuf> as Option<Socket> = default(
            None,
            "`SPIFFE_ENDPOINT_SOCKET`, else `unix:///var/run/secrets/workload-spiffe-uds/socket`"
        );
    }
}

impl Identity {
    /// Returns the word for it in `strait.yaml`.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Files(_) => "files",
            Self::IstioCa(_) => "istio-ca",
            Self::Spiffe(_) => "spiffe",
        }
    }
}

impl Type for Identity {
    type Out = Self;

    fn read(value: Value<'_>) -> Option<Self> {
        let kinds: [(_, ReadKeys<Self>); 3] = [
            ("files", |keys| IdentityFiles::read_keys(keys).map(Self::Files)),
            ("istio-ca", |keys| IstioCa::read_keys(keys).map(Self::IstioCa)),
            ("spiffe", |keys| WorkloadApi::read_keys(keys).map(Self::Spiffe)),
        ];
        read_kind(value.fields("identity")?, "files", &kinds)
    }

    fn show(out: &Self) -> Json {
        json!(out)
    }

    fn shape() -> Shape {
        Shape::Kinds(vec![
            ("files", IdentityFiles::keys()),
            ("istio-ca", IstioCa::keys()),
            ("spiffe", WorkloadApi::keys()),
        ])
    }
}

form! {
    /// The socket of a SPIFFE Workload API.
    Socket => PathBuf,
        "the socket of a SPIFFE Workload API, such as \
         `unix:///var/run/secrets/workload-spiffe-uds/socket`",
        matching("^unix:/"),
        |value, wanted| value.parsed(wanted, unix_socket), |socket| path(socket);
    /// The name of a trust domain.
    DomainName => String, "the name of a trust domain alone, such as `east.local`", TEXT,
        domain_name, |name| json!(name);
}

fn domain_name(value: Value<'_>, wanted: &str) -> Option<String> {
    let text = value.text()?;
    if text.contains('*') {
        let what = format!("is `{text}`, and a pattern would trust domains that are not listed");
        value.error(what, "each trust domain by its name");
        return None;
    }
    value.parsed(wanted, |text| {
        let name = SpiffeTrustDomain::new(text).ok().filter(|_| !text.contains("://"))?;
        Some(name.as_str().to_owned())
    })
}

/// Returns the path of a unix socket in SPIFFE's form, `unix:///PATH`; none of other addresses.
pub fn unix_socket(text: &str) -> Option<PathBuf> {
    let path = text.strip_prefix("unix://").or_else(|| text.strip_prefix("unix:"));
    let path = PathBuf::from(path?);
    path.is_absolute().then_some(path)
}

/// Splits an identity of Istio's form, `spiffe://DOMAIN/ns/NAMESPACE/sa/ACCOUNT`, into trust
/// domain, namespace and service account. Other forms are rejected.
pub fn parse_identity(uri: &str) -> Option<[&str; 3]> {
    let id = SpiffeId::new(uri).ok()?;
    // The crate lower-cases the trust domain; here a domain is compared byte for byte.
    if uri.len() > ID_BYTES_MAX || id.to_string() != uri {
        return None;
    }
    let mut parts = uri.strip_prefix("spiffe://")?.split('/');
    match [parts.next()?, parts.next()?, parts.next()?, parts.next()?, parts.next()?] {
        [domain, "ns", namespace, "sa", account] if parts.next().is_none() => {
            Some([domain, namespace, account])
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_plain_form_of_an_istio_identity_is_accepted() {
        let long = format!("spiffe://td/ns/{}/sa/x", "n".repeat(2048));
        let bad = "spiffe://td spiffe://td/ spiffe://td/ns/a/sa spiffe://td/ns/a/sa/ \
            spiffe://td/ns/a/sa/b/ spiffe://td/ns/a/sa/b/c spiffe://td/ns//sa/b \
            spiffe://td/ns/../sa/b spiffe://td/ns/./sa/b spiffe://td//ns/a/sa/b \
            spiffe://td/sa/a/ns/b spiffe://td/ns/a/sa/b?x=1 spiffe://td/ns/a/sa/b#x \
            spiffe://td:443/ns/a/sa/b spiffe://user@td/ns/a/sa/b spiffe://TD/ns/a/sa/b \
            SPIFFE://td/ns/a/sa/b https://td/ns/a/sa/b spiffe:///ns/a/sa/b \
            spiffe://t%64/ns/a/sa/b spiffe://td/ns/%61/sa/b spiffe://тд/ns/a/sa/b \
            spiffe://*/ns/a/sa/b";
        for uri in bad.split_whitespace().chain(["spiffe://td/ns/a/sa/b\0", "", &long]) {
            assert_eq!(parse_identity(uri), None, "{uri:?}");
        }
        assert_eq!(
            parse_identity("spiffe://east.local/ns/a_b/sa/c.d"),
            Some(["east.local", "a_b", "c.d"])
        );
    }
}
