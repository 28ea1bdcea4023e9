//! Where the certificate and the mesh come from: `identity` and `discovery`.

use std::path::PathBuf;
use std::time::Duration;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use spiffe::SpiffeId;

use super::fields::{Fields, Value};
use super::headers;
use super::listeners::socket_address;
use super::read::trust_domain_name;
use super::{
    CERTIFICATE_TTL, ControlPlane, Discovery, Dns, HostPort, Identity, IdentityFiles, IstioCa,
    Roots, TRUST_DOMAIN,
};

pub(super) const IDENTITY_EXAMPLE: &str =
    "{kind: files, chain: certs/gateway.crt, key: certs/gateway.key, roots: certs/root.crt}";

/// The word for the system's roots.
const SYSTEM: &str = "SYSTEM";

/// Less than this cannot be renewed in time, and more is no workload's certificate any more.
const TTL: (Duration, Duration) = (
    Duration::from_secs(60),
    Duration::from_secs(365 * 24 * 60 * 60),
);

/// Who is asked for the addresses of hostnames.
pub(super) fn dns(value: Value<'_>) -> Option<Dns> {
    let mut fields = value.fields("dns")?;
    let servers: Option<Vec<_>> = match fields.get("servers") {
        // Collected before it is turned around, so that every entry reports its findings.
        Some(list) => {
            let read: Vec<_> = list.items().map(socket_address).collect();
            read.into_iter().collect()
        }
        None => Some(Vec::new()),
    };
    fields.finish();
    Some(Dns { servers: servers? })
}

pub(super) fn identity(value: Value<'_>) -> Option<Identity> {
    /// Reads the keys of one kind.
    type Read = fn(Fields<'_>) -> Option<Identity>;
    let mut fields = value.fields("identity")?;
    // The other keys belong to a kind that we do not know, so nothing can be said about them.
    let kinds = [
        ("files", files as Read),
        ("istio-ca", istio_ca),
        ("spiffe", workload_api),
    ];
    let read = fields.need("kind", "files")?.choice(&kinds)?;
    read(fields)
}

fn files(mut fields: Fields<'_>) -> Option<Identity> {
    let mut path = |key, example| fields.need(key, example).and_then(Value::existing_path);
    let chain = path("chain", "certs/gateway.crt");
    let key = path("key", "certs/gateway.key");
    let roots = path("roots", "certs/root.crt");
    fields.finish();
    Some(Identity::Files(IdentityFiles {
        chain: chain?,
        key: key?,
        roots: roots?,
    }))
}

fn istio_ca(mut fields: Fields<'_>) -> Option<Identity> {
    let plane = control_plane(&mut fields);
    let trust_domain = match fields.get("trust_domain") {
        Some(value) => trust_domain_name(value),
        None => Some(TRUST_DOMAIN.to_owned()),
    };
    let namespace = optional(&mut fields, "namespace", segment);
    let service_account = optional(&mut fields, "service_account", segment);
    let ttl = fields.get("ttl").map_or(Some(CERTIFICATE_TTL), ttl);
    fields.finish();
    Some(Identity::IstioCa(IstioCa {
        plane: plane?,
        trust_domain: trust_domain?,
        namespace: namespace?,
        service_account: service_account?,
        ttl: ttl?,
    }))
}

/// A part of a SPIFFE id's path.
fn segment(value: Value<'_>) -> Option<String> {
    let wanted = "a name of letters, digits, `-`, `_` and `.`";
    value.parsed(wanted, |text| {
        let domain = TRUST_DOMAIN.try_into().ok()?;
        let is_one = SpiffeId::from_segments(domain, &[text]).is_ok();
        is_one.then(|| text.to_owned())
    })
}

fn ttl(value: Value<'_>) -> Option<Duration> {
    let wanted = "a duration from 1m to 365d, such as `24h`";
    value.parsed(wanted, |text| {
        let ttl = humantime::parse_duration(text).ok()?;
        (TTL.0..=TTL.1).contains(&ttl).then_some(ttl)
    })
}

fn workload_api(mut fields: Fields<'_>) -> Option<Identity> {
    let socket = optional(&mut fields, "socket", |value| {
        let wanted = "the socket of a SPIFFE Workload API, such as \
                      `unix:///var/run/secrets/workload-spiffe-uds/socket`";
        value.parsed(wanted, unix_socket)
    });
    fields.finish();
    Some(Identity::Spiffe { socket: socket? })
}

/// The path of a unix socket as SPIFFE writes it, `unix:///PATH`; none of any other address.
pub fn unix_socket(text: &str) -> Option<PathBuf> {
    let path = text
        .strip_prefix("unix://")
        .or_else(|| text.strip_prefix("unix:"));
    let path = PathBuf::from(path?);
    path.is_absolute().then_some(path)
}

pub(super) fn discovery(value: Value<'_>) -> Option<Discovery> {
    let mut fields = value.fields("discovery")?;
    let kind = fields.need("kind", "file")?;
    // As for `identity`: the keys of another kind are none of ours.
    if kind.is_later(&["envoy"], "`file` or `istio`") {
        return None;
    }
    if kind.choice(&[("file", false), ("istio", true)])? {
        let plane = control_plane(&mut fields);
        let cache = optional(&mut fields, "cache", Value::new_path);
        let on_demand = optional(&mut fields, "on_demand", Value::flag);
        fields.finish();
        return Some(Discovery::Istio {
            plane: plane?,
            cache: cache?,
            on_demand: on_demand?.unwrap_or(false),
        });
    }
    let path = fields
        .need("path", "mesh.yaml")
        .and_then(Value::existing_path);
    fields.finish();
    Some(Discovery::File { path: path? })
}

/// The keys of a control plane, for the mesh and for certificates alike.
fn control_plane(fields: &mut Fields<'_>) -> Option<ControlPlane> {
    let address = fields
        .need("address", "istiod.istio-system.svc:15012")
        .and_then(|value| {
            let wanted = "a host and a port, such as `istiod.istio-system.svc:15012`";
            value.parsed(wanted, |text| {
                HostPort::parse(text)
                    .ok()
                    .filter(|address| address.port.is_some())
            })
        });
    let roots = fields
        .need("roots", "/var/run/secrets/istio/root-cert.pem")
        .and_then(roots);
    let token = optional(fields, "token", Value::existing_path);
    let san = optional(fields, "san", |value| value.text().map(str::to_owned));
    let headers = optional(fields, "headers", headers::read);
    Some(ControlPlane {
        address: address?,
        roots: roots?,
        token: token?,
        san: san?,
        headers: headers?.unwrap_or_default(),
    })
}

/// Roots as ztunnel's `XDS_ROOT_CA` has them: a file, its text, or the word for the system's.
fn roots(value: Value<'_>) -> Option<Roots> {
    let text = value.text()?;
    if text == SYSTEM {
        return Some(Roots::System);
    }
    if !text.trim_start().starts_with("-----BEGIN") {
        return value.existing_path().map(Roots::File);
    }
    let mut certificates = CertificateDer::pem_slice_iter(text.as_bytes()).peekable();
    if certificates.peek().is_none() || certificates.any(|certificate| certificate.is_err()) {
        let how = format!("PEM of certificates, the path of a file with them, or `{SYSTEM}`");
        value.error("has a PEM text that cannot be read as certificates", how);
        return None;
    }
    Some(Roots::Pem(text.to_owned()))
}

/// A key that may be left out; none where it is given and wrong.
fn optional<'a, T>(
    fields: &mut Fields<'a>,
    key: &'static str,
    read: impl FnOnce(Value<'a>) -> Option<T>,
) -> Option<Option<T>> {
    match fields.get(key) {
        Some(value) => read(value).map(Some),
        None => Some(None),
    }
}
