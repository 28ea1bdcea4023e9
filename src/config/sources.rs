//! Where the certificate and the mesh come from: `identity` and `discovery`.

use std::path::PathBuf;
use std::time::Duration;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde::Serialize;
use spiffe::SpiffeId;

use super::headers;
use super::trust::trust_domain_name;
use super::{
    CERTIFICATE_TTL, ControlPlane, Discovery, Dns, HostPort, Identity, IdentityFiles, IstioCa,
    Roots, TRUST_DOMAIN,
};
use crate::yaml::{Fields, Value};

pub(super) const IDENTITY_EXAMPLE: &str =
    "{kind: files, chain: certs/gateway.crt, key: certs/gateway.key, roots: certs/root.crt}";

/// The word for the system's roots.
const SYSTEM: &str = "SYSTEM";

/// Less than this cannot be renewed in time, and more is no workload's certificate any more.
const TTL: (Duration, Duration) = (
    Duration::from_secs(60),
    Duration::from_secs(365 * 24 * 60 * 60),
);

/// Who we are to a control plane of Envoy's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct NodeNames {
    /// The node's id. Default: the pod's name and namespace.
    pub id: Option<String>,
    /// The node's cluster, in Envoy's sense. Default: `gateway.cluster`.
    pub cluster: Option<String>,
}

/// A cluster and the service that it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NamedCluster {
    /// The cluster's name. Required.
    pub cluster: String,
    /// The host and port that peers ask for. Required.
    pub service: HostPort,
}

/// Who is asked for the addresses of hostnames.
pub(super) fn dns(value: Value<'_>) -> Option<Dns> {
    let mut fields = value.fields("dns")?;
    let servers: Option<Vec<_>> = match fields.get("servers") {
        // Collected before it is turned around, so that every entry reports its findings.
        Some(list) => {
            let wanted = "the address and the port of a DNS server, such as `\"10.96.0.10:53\"`";
            let server = |item: Value<'_>| item.parsed(wanted, |text| text.parse().ok());
            let read: Vec<_> = list.items().map(server).collect();
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
    let mut path = |key, example| fields.need(key, example).and_then(Value::credential_path);
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
    let cache = optional(&mut fields, "cache", Value::new_folder);
    fields.finish();
    Some(Identity::IstioCa(IstioCa {
        plane: plane?,
        trust_domain: trust_domain?,
        namespace: namespace?,
        service_account: service_account?,
        ttl: ttl?,
        cache: cache?,
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
    /// Reads the keys of one kind.
    type Read = fn(Fields<'_>) -> Option<Discovery>;
    let mut fields = value.fields("discovery")?;
    // As for `identity`: the keys of another kind are none of ours.
    let kinds = [
        ("file", mesh_file as Read),
        ("istio", istio),
        ("envoy", envoy),
    ];
    let read = fields.need("kind", "file")?.choice(&kinds)?;
    read(fields)
}

fn istio(mut fields: Fields<'_>) -> Option<Discovery> {
    let plane = control_plane(&mut fields);
    let cache = optional(&mut fields, "cache", Value::new_path);
    fields.finish();
    Some(Discovery::Istio {
        plane: plane?,
        cache: cache?,
    })
}

fn envoy(mut fields: Fields<'_>) -> Option<Discovery> {
    let has_tls = optional(&mut fields, "tls", |value| {
        let has_tls = value.choice(&[("on", true), ("off", false)])?;
        if !has_tls {
            let what = "is `off`: whoever can reach the way to the control plane can program this \
                        gateway";
            value.warning(what, "`on`, unless it is a sidecar at this host's loopback");
        }
        Some(has_tls)
    });
    let plane = match has_tls {
        Some(Some(false)) => plaintext(&mut fields),
        _ => control_plane(&mut fields),
    };
    let cache = optional(&mut fields, "cache", Value::new_path);
    let node = optional(&mut fields, "node", node);
    let clusters = optional(&mut fields, "clusters", clusters);
    fields.finish();
    has_tls?;
    Some(Discovery::Envoy {
        plane: plane?,
        cache: cache?,
        node: node?.unwrap_or_default(),
        clusters: clusters?.unwrap_or_default(),
    })
}

fn node(value: Value<'_>) -> Option<NodeNames> {
    let mut fields = value.fields("discovery.node")?;
    let mut name = |key| optional(&mut fields, key, |value| value.text().map(str::to_owned));
    let (id, cluster) = (name("id"), name("cluster"));
    fields.finish();
    Some(NodeNames {
        id: id?,
        cluster: cluster?,
    })
}

fn clusters(value: Value<'_>) -> Option<Vec<NamedCluster>> {
    let mut read: Vec<NamedCluster> = Vec::new();
    let mut good = value.is_list();
    for entry in value.items() {
        match named_cluster(entry, &read) {
            Some(one) => read.push(one),
            None => good = false,
        }
    }
    good.then_some(read)
}

fn named_cluster(entry: Value<'_>, others: &[NamedCluster]) -> Option<NamedCluster> {
    let mut fields = entry.fields("discovery.clusters[]")?;
    let name = fields.need("cluster", "echo").and_then(Value::text);
    let service = fields.need("service", "\"echo.app.mesh.internal:80\"");
    let service = service.and_then(|value| {
        let wanted = "a host name and a port, such as `echo.app.mesh.internal:80`";
        value.parsed(wanted, |text| {
            let read = HostPort::parse(text).ok()?;
            (read.port.is_some() && !read.is_address()).then_some(read)
        })
    });
    fields.finish();
    let (cluster, service) = (name?.to_owned(), service?);
    let what = match others {
        _ if others.iter().any(|other| other.cluster == cluster) => format!("cluster `{cluster}`"),
        _ if others.iter().any(|other| other.service == service) => format!("service `{service}`"),
        _ => return Some(NamedCluster { cluster, service }),
    };
    entry.error(format!("has the {what} twice"), "one cluster for each port");
    None
}

fn mesh_file(mut fields: Fields<'_>) -> Option<Discovery> {
    let path = fields
        .need("path", "mesh.yaml")
        .and_then(Value::existing_path);
    fields.finish();
    Some(Discovery::File { path: path? })
}

/// The keys of a control plane that is not verified. A token is for one that is.
fn plaintext(fields: &mut Fields<'_>) -> Option<ControlPlane> {
    let address = address(fields);
    let headers = optional(fields, "headers", headers::read);
    let mut good = true;
    for key in ["roots", "token", "san"] {
        if let Some(value) = fields.get(key) {
            value.error(
                "has no use with `tls: off`",
                "`tls: on`, or the file without it",
            );
            good = false;
        }
    }
    let plane = ControlPlane {
        address: address?,
        roots: Roots::Plaintext,
        token: None,
        san: None,
        headers: headers?.unwrap_or_default(),
    };
    good.then_some(plane)
}

fn address(fields: &mut Fields<'_>) -> Option<HostPort> {
    let value = fields.need("address", "istiod.istio-system.svc:15012")?;
    let wanted = "a host and a port, such as `istiod.istio-system.svc:15012`";
    value.parsed(wanted, |text| {
        let address = HostPort::parse(text).ok();
        address.filter(|address| address.port.is_some())
    })
}

/// The keys of a control plane, for the mesh and for certificates alike.
fn control_plane(fields: &mut Fields<'_>) -> Option<ControlPlane> {
    let address = address(fields);
    let roots = fields
        .need("roots", "/var/run/secrets/istio/root-cert.pem")
        .and_then(roots);
    let token = optional(fields, "token", Value::credential_path);
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
        return value.credential_path().map(Roots::File);
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::config::{Config, Discovery, HostPort, Roots};

    const BASE: &str = "
gateway: {cluster: east}
identity: {kind: files, chain: Cargo.toml, key: Cargo.toml, roots: Cargo.toml}
trust: {domains: [{name: west.local}]}
listeners: [{name: a, bind: \"127.0.0.1:15008\"}]
exposure: {default: all}
";

    /// The configuration with these keys of `discovery`, and what is said of them.
    fn envoy(keys: &str) -> (Option<Discovery>, String) {
        let text = format!("discovery: {{kind: envoy, {keys}}}{BASE}");
        let (config, findings) = Config::parse(Path::new("x.yaml"), &text);
        let said = findings.0.iter().map(ToString::to_string);
        let said: Vec<_> = said.filter(|one| one.starts_with("x.yaml:1:")).collect();
        (config.map(|config| config.discovery), said.join("\n"))
    }

    #[test]
    fn a_control_plane_of_envoys_may_name_clusters_and_our_node() {
        let (read, said) = envoy(
            "address: \"xds:18000\", roots: SYSTEM, token: Cargo.toml, san: a.b, \
             headers: {x-a: b}, cache: state, node: {id: gw, cluster: edge}, \
             clusters: [{cluster: a, service: \"Echo.app:80\"}, \
             {cluster: b, service: \"echo.app:81\"}]",
        );
        assert_eq!(said, "");
        let Some(Discovery::Envoy {
            plane,
            cache,
            node,
            clusters,
        }) = read
        else {
            panic!("another kind");
        };
        assert_eq!(
            (plane.roots, plane.san.as_deref()),
            (Roots::System, Some("a.b"))
        );
        assert!(plane.token.is_some() && cache.is_some() && plane.headers.len() == 1);
        assert_eq!(
            (node.id.as_deref(), node.cluster.as_deref()),
            (Some("gw"), Some("edge"))
        );
        let want = HostPort::parse("echo.app:80").expect("a service");
        assert_eq!((&*clusters[0].cluster, &clusters[0].service), ("a", &want));
        let (read, said) = envoy("address: \"xds:1\", roots: SYSTEM, tls: on");
        assert_eq!(said, "");
        let Some(Discovery::Envoy { node, clusters, .. }) = read else {
            panic!("another kind");
        };
        assert_eq!((node.id, node.cluster, clusters.len()), (None, None, 0));
    }

    #[test]
    fn plaintext_is_one_word_with_a_warning() {
        let (read, said) = envoy("address: \"127.0.0.1:1\", tls: off");
        let Some(Discovery::Envoy { plane, .. }) = read else {
            panic!("another kind");
        };
        assert_eq!(plane.roots, Roots::Plaintext);
        assert!(
            said.contains(":1: warning: `discovery.tls` is `off`"),
            "{said}"
        );
        for key in ["roots: SYSTEM", "token: Cargo.toml", "san: a.b"] {
            let (read, said) = envoy(&format!("address: \"127.0.0.1:1\", tls: off, {key}"));
            let name = key.split(':').next().expect("a key");
            let want = format!("error: `discovery.{name}` has no use with `tls: off`; write ");
            assert!(read.is_none() && said.contains(&want), "{said}");
        }
    }

    #[test]
    fn policies_are_not_asked_for_where_nobody_tells_any() {
        for (mode, is_good) in [("off", true), ("audit", false), ("enforce", false)] {
            let keys = "kind: envoy, address: \"xds:1\", roots: SYSTEM";
            let text = format!("policy: {{istio: {mode}}}\ndiscovery: {{{keys}}}{BASE}");
            let (config, findings) = Config::parse(Path::new("x.yaml"), &text);
            assert_eq!(config.is_some(), is_good, "{findings}");
            let want = "x.yaml:1: error: `policy.istio` asks for Istio's policies";
            assert_eq!(findings.to_string().contains(want), !is_good, "{findings}");
        }
    }

    #[test]
    fn a_mistake_in_a_key_of_envoys_is_named() {
        for (keys, want) in [
            ("", "`discovery` has no `roots`; write `roots: "),
            (
                "roots: SYSTEM, tls: yes",
                "`discovery.tls` cannot be `yes`; write one of `on`, `off`",
            ),
            (
                "roots: SYSTEM, on_demand: true",
                "unknown key `on_demand` in `discovery`",
            ),
            ("roots: SYSTEM, cache: src", "`discovery.cache` is `"),
            (
                "roots: SYSTEM, node: gw",
                "`discovery.node` is `gw`; write a map",
            ),
            (
                "roots: SYSTEM, node: {id: \"\"}",
                "`discovery.node.id` is empty",
            ),
            (
                "roots: SYSTEM, node: {name: a}",
                "unknown key `name` in `discovery.node`",
            ),
            (
                "roots: SYSTEM, clusters: {}",
                "`discovery.clusters` is a map; write a list",
            ),
            (
                "roots: SYSTEM, clusters: [{cluster: a}]",
                "`discovery.clusters[]` has no `service`; write `service: \"echo.app",
            ),
            (
                "roots: SYSTEM, clusters: [{service: \"a:1\"}]",
                "`discovery.clusters[]` has no `cluster`; write `cluster: echo`",
            ),
            (
                "roots: SYSTEM, clusters: [{cluster: a, service: b}]",
                "`discovery.clusters[].service` is `b`; write a host name and a port",
            ),
            (
                "roots: SYSTEM, clusters: [{cluster: a, service: \"10.0.0.1:80\"}]",
                "`discovery.clusters[].service` is `10.0.0.1:80`; write a host name and a port",
            ),
            (
                "roots: SYSTEM, clusters: [{cluster: a, service: \"b:1\", port: 1}]",
                "unknown key `port` in `discovery.clusters[]`",
            ),
            (
                "roots: SYSTEM, clusters: [{cluster: a, service: \"b:1\"}, {cluster: a, service: \
                 \"b:2\"}]",
                "has the cluster `a` twice; write one cluster for each port",
            ),
            (
                "roots: SYSTEM, clusters: [{cluster: a, service: \"b:1\"}, {cluster: b, service: \
                 \"B:1\"}]",
                "has the service `b:1` twice; write one cluster for each port",
            ),
        ] {
            let (read, said) = envoy(&format!("address: \"xds:1\", {keys}"));
            assert!(read.is_none() && said.contains(want), "{keys}: {said}");
        }
        let (read, said) = envoy("address: xds, roots: SYSTEM");
        assert!(
            read.is_none() && said.contains("`discovery.address` is `xds`"),
            "{said}"
        );
    }
}
