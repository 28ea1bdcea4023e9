//! The `discovery` section, and the control planes of `discovery` and `identity`.

use std::path::PathBuf;
use std::time::Duration;

use derive_more::Display;
use http::HeaderName;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde::{Serialize, Serializer};
use serde_json::{Value as Json, json};

use super::HostPort;
use super::auto::Selector;
use super::define::{
    Absent, Address, Credential, DrainTime, NewFile, ServicePort, Shape, TEXT, Type, scalar,
    section, words,
};
use crate::yaml::{Fields, Value};

/// The word for the system's roots.
const SYSTEM: &str = "SYSTEM";

/// Default of `discovery.hold`.
const HOLD: Duration = Duration::from_secs(600);

const ADDRESS_EXAMPLE: &str = "istiod.istio-system.svc:15012";

/// Source of the mesh.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Discovery {
    /// A mesh file, which is watched.
    File(MeshFile),
    /// istiod: workloads and services by WDS over delta ADS.
    Istio(XdsSource),
    /// The objects of a Kubernetes API server, which are watched.
    Kubernetes(KubernetesApi),
    /// Any control plane of Envoy's: clusters and endpoints by CDS and EDS over delta ADS.
    Envoy(EnvoySource),
}

section! {
    /// Discovery from a mesh file.
    pub struct MeshFile at "discovery" {
        /// The mesh file, in the form of ztunnel's local configuration.
        path: PathBuf as super::define::ExistingPath = required("mesh.yaml");
    }
}

section! {
    /// A Kubernetes API server whose objects are watched.
    pub struct KubernetesApi at "discovery" | "exposure.kubernetes" or default {
        /// File with the address and the credentials of the API server, as `kubectl` has it.
        kubeconfig: Option<PathBuf> as Option<Credential> = default(
            None, "the API server and the service account of the pod") since "0.1.0";
        /// Namespaces whose objects are read, by the labels of their Namespace objects. Those
        /// of the others have no effect, their restrictions included.
        namespaces: Option<Selector> = default(None, "every namespace") since "0.1.0";
        /// File for the last objects, for a start without the API server. It is written and read as
        /// that of a control plane, and has to be another one.
        cache: Option<PathBuf> as Option<NewFile> = default(
            None, "nothing is stored") since "0.1.0";
        /// Time for which a mass removal is held: of more than half of the objects of a kind, and
        /// at least 10, within a minute of a list of that kind. All that is removed in that minute
        /// stays in force until the time has passed or `strait release` is typed. `0s` obeys at
        /// once.
        hold: Duration as DrainTime = default(HOLD) since "0.1.0";
    }
}

section! {
    /// Discovery from istiod.
    pub struct XdsSource at "discovery" {
        /// The control plane.
        plane: ControlPlane = flatten(ControlPlane::read_keys);
        /// File for the last good state, for a start without the control plane. It is written every
        /// 5 s at most, or every minute where a write takes long. Only a mesh of the same cluster
        /// and network is read from it, and a damaged file is ignored. Its directory must be
        /// writable.
        cache: Option<PathBuf> as Option<NewFile> = default(None, "nothing is stored");
        /// Time for which a mass removal is held: of more than half of the services, workloads,
        /// clusters, endpoint assignments or policies, and at least 10, within a minute of their
        /// first response on a stream. All that is removed in that minute stays in force until the
        /// time has passed or `strait release` is typed. `0s` obeys at once.
        hold: Duration as DrainTime = default(HOLD);
    }
}

section! {
    /// Discovery from a control plane of Envoy's.
    pub struct EnvoySource at "discovery" {
        /// Use of TLS. `off` is plaintext, with a warning and without `roots`, `token` and `san`,
        /// for a control plane beside the gateway on the loopback of the host.
        tls: Tls = default(Tls::On);
        /// The control plane.
        xds: XdsSource = flatten(control_plane);
        /// Names of the gateway towards the control plane.
        node: NodeNames = nested();
        /// Clusters whose names do not contain their service.
        clusters: Vec<NamedCluster> = default(Vec::new());
    }
}

words! {
    /// Use of TLS towards a control plane.
    pub enum Tls {
        /// TLS.
        On = "on",
        /// Plaintext.
        Off = "off",
    }
}

section! {
    /// A control plane, which is reached by gRPC.
    pub struct ControlPlane at "discovery" {
        /// Host and port.
        address: HostPort as Address = required("istiod.istio-system.svc:15012");
        /// Roots by which the server is verified: a PEM file, read for each connection, a PEM text,
        /// or `SYSTEM` for those of the system (`SSL_CERT_FILE`, else its bundle).
        roots: Roots = required("/var/run/secrets/istio/root-cert.pem");
        /// File with the token of the pod, read for each call. It is sent to verified servers only.
        token: Option<PathBuf> as Option<Credential> = default(None, "no token is sent");
        /// Name that the server's certificate must have.
        san: Option<String> = default(None, "the host of `address`");
        /// Metadata for each call besides `clusterid`, such as `{x-tenant: blue}`. Values are never
        /// shown.
        headers: Vec<(String, String)> as Headers = default(Vec::new(), "none");
    }
}

section! {
    /// Names of the gateway towards a control plane of Envoy's.
    pub struct NodeNames at "discovery.node" or default, derive(Eq) {
        /// Id of the node.
        id: Option<String> = default(None, "the pod's name and namespace");
        /// Cluster of the node, in Envoy's sense.
        cluster: Option<String> = default(None, "the value of `gateway.cluster`");
    }
}

section! {
    /// A cluster and its service.
    pub struct NamedCluster at "discovery.clusters[]", derive(Eq), compare(compare_clusters) {
        /// Name of the cluster.
        cluster: String = required("echo");
        /// Hostname and port in requests of peers.
        service: HostPort as ServicePort = required("\"echo.app.mesh.internal:80\"");
    }
}

/// The roots by which a control plane is verified.
#[derive(Clone, Debug, Display, PartialEq, Eq)]
pub enum Roots {
    /// Those of a PEM file, read for each connection.
    #[display("{}", _0.display())]
    File(PathBuf),
    /// Those of a PEM text.
    #[display("PEM")]
    Pem(String),
    /// Those of the system, looked up for each connection.
    #[display("{SYSTEM}")]
    System,
    /// None: there is no TLS, and any server at the address is trusted.
    #[display("none, by plaintext")]
    Plaintext,
}

impl Serialize for Roots {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Discovery {
    /// Returns whether Kubernetes objects define services and endpoints. Under a control plane,
    /// which provides these itself, they only export services.
    pub fn is_of_objects(&self) -> bool {
        matches!(self, Self::File(_) | Self::Kubernetes(_))
    }

    /// Returns the control plane, if the mesh comes from one.
    pub fn xds(&self) -> Option<&XdsSource> {
        match self {
            Self::Istio(xds) | Self::Envoy(EnvoySource { xds, .. }) => Some(xds),
            Self::File(_) | Self::Kubernetes(_) => None,
        }
    }
}

impl Type for Discovery {
    type Out = Self;

    fn read(value: Value<'_>) -> Option<Self> {
        let kinds: [(_, ReadKeys<Self>); 4] = [
            ("file", |keys| MeshFile::read_keys(keys).map(Self::File)),
            ("kubernetes", |keys| KubernetesApi::read_keys(keys).map(Self::Kubernetes)),
            ("istio", |keys| XdsSource::read_keys(keys).map(Self::Istio)),
            ("envoy", |keys| EnvoySource::read_keys(keys).map(Self::Envoy)),
        ];
        let read = read_kind(value.fields("discovery")?, "file", &kinds);
        if let Some(Self::Envoy(EnvoySource { tls: Tls::Off, .. })) = &read {
            let what = "is `off`: anyone on the path to the control plane can program this gateway";
            let how = "`on`, unless it is a sidecar on the loopback of this host";
            value.at("discovery", "tls").warning(what, how);
        }
        read
    }

    fn show(out: &Self) -> Json {
        json!(out)
    }

    fn shape() -> Shape {
        let mut envoy = EnvoySource::keys();
        for key in envoy.iter_mut().filter(|key| key.name == "roots") {
            key.absent = Absent::Otherwise("required, except with `tls: off`");
            let is_off = json!({"properties": {"tls": {"const": "off"}}, "required": ["tls"]});
            key.unless = Some(is_off);
        }
        Shape::Kinds(vec![
            ("file", MeshFile::keys()),
            ("kubernetes", KubernetesApi::keys()),
            ("istio", XdsSource::keys()),
            ("envoy", envoy),
        ])
    }
}

/// Reader of the keys of one kind.
pub(super) type ReadKeys<T> = fn(&mut Fields<'_>) -> Option<T>;

/// Reads the keys of the kind that a map names. The keys of an unknown kind are not checked.
pub(super) fn read_kind<T>(
    mut fields: Fields<'_>,
    example: &str,
    kinds: &[(&str, ReadKeys<T>)],
) -> Option<T> {
    let Some(read) = fields.need("kind", example).and_then(|kind| kind.choice(kinds)) else {
        fields.ignore();
        return None;
    };
    read(&mut fields)
}

/// Reads the keys of a control plane of Envoy's. Without TLS there is nothing to verify it by, and
/// a token is for a verified one.
fn control_plane(fields: &mut Fields<'_>) -> Option<XdsSource> {
    if fields.word("tls") != Some("off") {
        return XdsSource::read_keys(fields);
    }
    let address = fields.need("address", ADDRESS_EXAMPLE).and_then(Address::read);
    let headers = fields.get("headers").map_or(Some(Vec::new()), Headers::read);
    let cache = fields.get("cache").map_or(Some(None), Option::<NewFile>::read);
    let hold = fields.get("hold").map_or(Some(HOLD), DrainTime::read);
    let mut is_good = true;
    for key in ["roots", "token", "san"] {
        if let Some(value) = fields.get(key) {
            let how = "`tls: on`, or the file without it";
            value.error("has no use with `tls: off`", how);
            is_good = false;
        }
    }
    let plane = ControlPlane {
        address: address?,
        roots: Roots::Plaintext,
        token: None,
        san: None,
        headers: headers?,
    };
    is_good.then_some(XdsSource { plane, cache: cache?, hold: hold? })
}

fn compare_clusters(_: Value<'_>, read: &[(NamedCluster, Value<'_>)]) {
    for (at, (one, entry)) in read.iter().enumerate() {
        let NamedCluster { cluster, service } = one;
        let others = || read.iter().take(at).map(|(other, _)| other);
        let twice = if others().any(|other| other.cluster == *cluster) {
            format!("cluster `{cluster}`")
        } else if others().any(|other| other.service == *service) {
            format!("service `{service}`")
        } else {
            continue;
        };
        entry.error(format!("has the {twice} twice"), "one cluster for each port");
    }
}

scalar! {
    Roots => Roots, "the path of a PEM file, a PEM text, or `SYSTEM`", "string",
        |value, _| roots(value), |roots| json!(roots);
}

/// Reads roots as ztunnel's `XDS_ROOT_CA` has them: a file, its text, or the word for those of the
/// system.
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

/// Metadata of calls. That of gRPC and of the gateway itself cannot be replaced.
pub(in crate::config) enum Headers {}

const HEADER: &str = "the value of a header, in printable ASCII";

impl Type for Headers {
    type Out = Vec<(String, String)>;

    fn read(value: Value<'_>) -> Option<Self::Out> {
        // Values are secrets, in wrong places too.
        let read = value.secret().pairs().map(|(entry, value)| {
            let name = entry.key.to_ascii_lowercase();
            let is_ours = matches!(&*name, "authorization" | "clusterid" | "content-type" | "te");
            let is_name = HeaderName::from_bytes(name.as_bytes()).is_ok();
            if !is_name || is_ours || name.starts_with("grpc-") || name.ends_with("-bin") {
                let what = format!("has `{}`, which cannot be sent", entry.key.escape_debug());
                value.error(what, "the name of a custom header, such as `x-tenant`");
                return None;
            }
            let value = value.parsed(HEADER, |text| {
                let is_plain = text.bytes().all(|byte| matches!(byte, b' '..=b'~'));
                is_plain.then(|| text.to_owned())
            })?;
            Some((name, value))
        });
        read.collect::<Vec<_>>().into_iter().collect()
    }

    /// Shows the names. The values may be secrets.
    fn show(out: &Self::Out) -> Json {
        out.iter().map(|(name, _)| name.as_str()).collect()
    }

    fn shape() -> Shape {
        let of = Shape::Scalar(HEADER.to_owned(), json!({"type": TEXT}));
        Shape::Pairs(Box::new(of))
    }
}
