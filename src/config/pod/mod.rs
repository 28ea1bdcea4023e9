//! Settings of a pod, as a layer below `strait.yaml`: the environment, the arguments and the files
//! that Istio gives the containers of its gateways.
//!
//! The reader of `strait.yaml` checks the values, and its findings name the variable. This module
//! checks only what that reader does not see.

mod environment;
mod flags;
mod locality;
mod own;
#[cfg(test)]
mod tests;

use std::path::Path;
use std::thread;
use std::time::Duration;

use super::{DRAIN_LAG, TRUST_DOMAIN};
use crate::yaml::{Entry, Findings, Kind, Layer, Node, Position, Report};

pub use environment::Environment;
use environment::Setting;
pub use flags::truth;
pub use own::{Pod, workload_api};

/// File that is merged over the settings of a pod, if it exists.
pub const OVERLAY: &str = "/etc/strait/strait.yaml";
/// Origin of values that no variable sets.
const DEFAULT: &str = "the pod's default";
/// Default address of istiod.
const ISTIOD: &str = "istiod.istio-system.svc:15012";
/// Istio's file names of chain, key and roots.
const FILES: [&str; 3] = ["cert-chain.pem", "key.pem", "root-cert.pem"];
/// Directories of certificates: the user's, and those of a SPIFFE credentials driver.
const MOUNTED: &str = "etc/certs";
const CREDENTIALS: &str = "var/run/secrets/workload-spiffe-credentials";
/// Directory of the socket of a SPIFFE Workload API.
const SOCKETS: &str = "var/run/secrets/workload-spiffe-uds";
/// Files of the roots of istiod's certificate, and of the pod's token.
const ROOTS: &str = "var/run/secrets/istio/root-cert.pem";
const TOKEN: &str = "var/run/secrets/tokens/istio-token";
/// Directory that Istio gives its proxies to write to.
const DATA: &str = "var/lib/istio/data";
/// Directory in memory that Istio gives its proxies, for data that must not reach a disk.
const MEMORY: &str = "etc/istio/proxy";
/// File of the pod's labels, a line `KEY="VALUE"` for each.
const LABELS: &str = "etc/istio/pod/labels";
const NETWORK_LABEL: &str = "topology.istio.io/network";
/// Variables of the service account: Strait's and Istio's.
const ACCOUNT: [&str; 2] = ["SERVICE_ACCOUNT", "ISTIO_META_SERVICE_ACCOUNT"];
/// Part of the grace period for the end of the process: its own second, and the kubelet's delay.
const END: Duration = Duration::from_secs(5);

/// Variables without effect in this version, and the behaviour instead.
const UNHEARD: [(&str, &str); 2] = [
    ("PROV_CERT", "istiod receives only a token, that of AUTH_TOKEN"),
    (
        "COMPLIANCE_POLICY",
        "no such policy is enforced: TLS 1.3 with post-quantum key exchange preferred",
    ),
];

/// Settings of the arguments.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    /// The level of the log, and its flag.
    pub level: Option<(String, &'static str)>,
    /// `--log_as_json`.
    pub json: bool,
}

/// Settings of a pod.
#[derive(Clone, Debug)]
pub struct Defaults {
    /// The part of `strait.yaml` that the pod determines.
    layer: Layer,
    /// Mistakes in settings that only this module reads.
    pub findings: Findings,
}

impl Defaults {
    /// Returns the settings of a pod with this environment and these arguments.
    pub fn new(environment: &Environment, flags: &Flags) -> Self {
        let findings = environment.findings().clone();
        let root = Node::made(0, Kind::Null);
        let mut builder = Builder { environment, origins: Vec::new(), findings, root };
        builder.gateway();
        builder.identity();
        builder.trust();
        builder.listeners();
        builder.discovery();
        builder.workers();
        builder.set("admin.bind", setting("127.0.0.1:15000"));
        builder.metrics();
        builder.readiness();
        builder.drain();
        builder.log(flags);
        for (name, what) in UNHEARD {
            let setting = environment.first(&[name]);
            if let Some(setting) = setting.filter(|setting| truth(&setting.value) != Some(false)) {
                let what = format!("is set, and {what}");
                builder.warn(&setting, what, "");
            }
        }
        let Builder { origins, findings, root, .. } = builder;
        Self { layer: Layer { root, origins }, findings }
    }

    /// Returns the layer below this file, or below none. The pod's trust domain stands for its
    /// cluster, also if the file names the cluster.
    pub(super) fn under(&self, file: Option<&Node>) -> Layer {
        let mut layer = self.layer.clone();
        let cluster = file.and_then(|file| file.get("gateway")?.get("cluster"));
        let is_wrong =
            |node: &&Node| matches!(node.kind, Kind::Null | Kind::List(_) | Kind::Map(_));
        let cluster = cluster.filter(|node| !is_wrong(node));
        if let (Some(cluster), Some(own)) = (cluster, own_cluster(&mut layer.root)) {
            own.clone_from(cluster);
        }
        // The file's `trust.crl` replaces that of CRL_PATH as a whole: its own defaults are strict.
        // A zone of one source beside the region of another would be no locality.
        for (section, key) in [("trust", "crl"), ("gateway", "locality")] {
            if file.is_some_and(|file| file.get(section).and_then(|own| own.get(key)).is_some()) {
                remove(&mut layer.root, section, key);
            }
        }
        layer
    }
}

fn remove(root: &mut Node, section: &str, key: &str) {
    if let Some(Kind::Map(entries)) = root.get_mut(section).map(|own| &mut own.kind) {
        let others = entries.iter().filter(|entry| *entry.key != *key);
        *entries = others.cloned().collect();
    }
}

/// Returns the cluster of the first trust domain, the pod's.
fn own_cluster(root: &mut Node) -> Option<&mut Node> {
    match &mut root.get_mut("trust")?.get_mut("domains")?.kind {
        Kind::List(domains) => domains.first_mut()?.get_mut("cluster"),
        _ => None,
    }
}

/// Makes a value that no variable sets.
fn setting(value: &str) -> Setting {
    Setting { value: value.to_owned(), by: DEFAULT.to_owned() }
}

/// Builder of the layer, with the origins of its values.
struct Builder<'a> {
    environment: &'a Environment,
    origins: Vec<String>,
    findings: Findings,
    root: Node,
}

impl Builder<'_> {
    fn node(&mut self, by: &str, kind: Kind) -> Node {
        let known = self.origins.iter().position(|origin| origin == by);
        let index = known.unwrap_or_else(|| {
            self.origins.push(by.to_owned());
            self.origins.len() - 1
        });
        Node::made(index, kind)
    }

    /// Notes a warning about a value, once.
    fn warn(&mut self, setting: &Setting, what: String, how: &str) {
        self.report(setting, |report| report.warning(Position::Line(0), what, how));
    }

    /// Notes a finding about a value, once.
    fn report(&mut self, setting: &Setting, note: impl FnOnce(&Report)) {
        let report = Report::new(Path::new(&setting.by));
        note(&report);
        for finding in report.into_findings().0 {
            if !self.findings.0.contains(&finding) {
                self.findings.0.push(finding);
            }
        }
    }

    fn text(&mut self, setting: &Setting) -> Node {
        self.node(&setting.by, Kind::Text(setting.value.as_str().into()))
    }

    /// Makes a whole number, or text, which the reader then reports.
    fn number(&mut self, setting: &Setting) -> Node {
        match setting.value.parse() {
            Ok(number) => self.node(&setting.by, Kind::Int(number)),
            Err(_) => self.text(setting),
        }
    }

    fn map<'k>(&mut self, entries: impl IntoIterator<Item = (&'k str, Node)>) -> Node {
        let entries = entries.into_iter();
        let entries =
            entries.map(|(key, value)| Entry { key: key.into(), position: value.position, value });
        let entries = Kind::Map(entries.collect());
        self.node(DEFAULT, entries)
    }

    fn put(&mut self, path: &str, value: Node) {
        let nested = path.rsplit('.').fold(value, |value, key| self.map([(key, value)]));
        self.root = nested.over(&self.root);
    }

    fn put_list(&mut self, path: &str, items: impl Into<Box<[Node]>>) {
        let list = self.node(DEFAULT, Kind::List(items.into()));
        self.put(path, list);
    }

    /// Puts text at a path of keys, if there is any.
    fn set(&mut self, path: &str, setting: impl Into<Option<Setting>>) {
        if let Some(setting) = setting.into() {
            let text = self.text(&setting);
            self.put(path, text);
        }
    }

    fn gateway(&mut self) {
        self.set("gateway.cluster", self.cluster());
        let names = ["ISTIO_META_NETWORK", "NETWORK", "ISTIO_META_REQUESTED_NETWORK_VIEW"];
        let network = self.environment.first(&names);
        let network = network.or_else(|| self.environment.label(LABELS, NETWORK_LABEL));
        self.set("gateway.network", network);
        if let Some(locality) = locality::locality(self) {
            self.put("gateway.locality", locality);
        }
    }

    fn cluster(&self) -> Setting {
        let cluster = self.environment.first(&["ISTIO_META_CLUSTER_ID", "CLUSTER_ID"]);
        cluster.unwrap_or_else(|| setting("Kubernetes"))
    }

    /// Makes `identity`: certificates in files if there are any, else a SPIFFE Workload API if its
    /// socket is mounted, else Istio's authority.
    fn identity(&mut self) {
        let environment = self.environment;
        if let Some((true, by)) = self.flag("FILE_MOUNTED_CERTS") {
            return self.files(&by, MOUNTED);
        }
        for folder in [CREDENTIALS, MOUNTED] {
            if FILES.iter().all(|file| environment.has(&format!("{folder}/{file}"))) {
                return self.files(DEFAULT, folder);
            }
        }
        let socket = environment.first(&["WORKLOAD_IDENTITY_SOCKET_FILE"]);
        let socket = socket.unwrap_or_else(|| setting("socket"));
        let path = format!("{SOCKETS}/{}", socket.value);
        if environment.has(&path) {
            let value = format!("unix://{}", environment.absolute(&path));
            self.set("identity.kind", setting("spiffe"));
            return self.set("identity.socket", Setting { value, ..socket });
        }
        self.set("identity.kind", setting("istio-ca"));
        let addresses = ["CA_ADDR", "CA_ADDRESS"];
        self.control_plane("identity", &addresses, "CA_ROOT_CA", "ALT_CA_HOSTNAME", "CA_HEADER_");
        self.set("identity.trust_domain", self.trust_domain());
        self.set("identity.namespace", environment.first(&["POD_NAMESPACE"]));
        self.set("identity.service_account", environment.first(&ACCOUNT));
        self.set("identity.ttl", environment.first(&["SECRET_TTL"]));
        if environment.has(MEMORY) {
            let cache = environment.path(&format!("{MEMORY}/strait-identity"));
            self.set("identity.cache", setting(&cache));
        }
    }

    fn files(&mut self, by: &str, folder: &str) {
        let setting = |value: &str| Setting { value: value.to_owned(), by: by.to_owned() };
        self.set("identity.kind", setting("files"));
        for (key, file) in ["chain", "key", "roots"].into_iter().zip(FILES) {
            let path = self.environment.path(&format!("{folder}/{file}"));
            self.set(&format!("identity.{key}"), setting(&path));
        }
    }

    /// Makes the keys that istiod as the source of the mesh and as the authority have in common.
    fn control_plane(
        &mut self,
        section: &str,
        addresses: &[&str],
        roots: &str,
        san: &str,
        headers: &str,
    ) {
        let environment = self.environment;
        let at = |key: &str| format!("{section}.{key}");
        let address = environment.first(addresses);
        let address = address.or_else(|| environment.proxy_config("discoveryAddress"));
        let mut address = address.unwrap_or_else(|| setting(ISTIOD));
        // ztunnel's variables have it as a URL.
        if let Some(rest) = address.value.strip_prefix("https://") {
            address.value = rest.trim_end_matches('/').to_owned();
        }
        self.set(&at("address"), address);
        for (key, name, default) in [("roots", roots, ROOTS), ("token", "AUTH_TOKEN", TOKEN)] {
            let file = environment.first(&[name]);
            self.set(&at(key), file.unwrap_or_else(|| setting(&environment.path(default))));
        }
        self.set(&at("san"), environment.first(&["ISTIOD_SAN", san]));
        let headers = environment.prefixed(headers).into_iter();
        let headers: Vec<_> = headers.map(|(name, value)| (name, self.text(&value))).collect();
        if !headers.is_empty() {
            let headers = self.map(headers);
            self.put(&at("headers"), headers);
        }
    }

    fn discovery(&mut self) {
        let environment = self.environment;
        if let Some(path) = environment.first(&["LOCAL_XDS_PATH"]) {
            self.set("discovery.kind", setting("file"));
            return self.set("discovery.path", path);
        }
        self.set("discovery.kind", setting("istio"));
        let addresses = ["XDS_ADDRESS"];
        let san = "ALT_XDS_HOSTNAME";
        self.control_plane("discovery", &addresses, "XDS_ROOT_CA", san, "XDS_HEADER_");
        if environment.has(DATA) {
            let cache = environment.path(&format!("{DATA}/strait-mesh"));
            self.set("discovery.cache", setting(&cache));
        }
    }

    fn trust_domain(&self) -> Setting {
        let domain = self.environment.first(&["TRUST_DOMAIN"]);
        domain.unwrap_or_else(|| setting(TRUST_DOMAIN))
    }

    /// Makes `trust`: the pod's own domain, which stands for its cluster, and others, which stand
    /// for themselves.
    fn trust(&mut self) {
        let own = self.trust_domain();
        let (name, cluster) = (self.text(&own), self.text(&self.cluster()));
        let mut domains = vec![self.map([("name", name), ("cluster", cluster)])];
        let others = self.environment.first(&["TRUST_DOMAINS"]);
        let mut seen = vec![own.value];
        for other in others.iter().flat_map(Setting::items) {
            if !seen.contains(&other.value) {
                let name = self.text(&other);
                domains.push(self.map([("name", name)]));
                seen.push(other.value);
            }
        }
        self.put_list("trust.domains", domains);
        if let Some(file) = self.environment.first(&["CRL_PATH"]) {
            // As lenient as ztunnel is.
            let accept = Setting { value: "accept".to_owned(), by: file.by.clone() };
            let file = self.text(&file);
            self.put_list("trust.crl.files", [file]);
            self.set("trust.crl.on_stale", accept.clone());
            self.set("trust.crl.on_missing", accept);
        }
        if let Some((skip, by)) = self.flag("SKIP_VALIDATE_TRUST_DOMAIN") {
            let skip = self.node(&by, Kind::Bool(skip));
            self.put("trust.skip_validation", skip);
        }
    }

    fn listeners(&mut self) {
        let address = self.address_of(setting("15008"));
        let (name, bind) = (self.text(&setting("cross-network")), self.text(&address));
        let listener = self.map([("name", name), ("bind", bind)]);
        self.put_list("listeners", [listener]);
    }

    /// Makes `metrics`: the port of Istio's agent, in the pod's annotations, and that of Envoy,
    /// which the pod declares. Monitoring may use either.
    fn metrics(&mut self) {
        let envoy = self.environment.first(&["ENVOY_PROMETHEUS_PORT"]);
        let ports = [setting("15020"), envoy.unwrap_or_else(|| setting("15090"))];
        let addresses = ports.map(|port| {
            let address = self.address_of(port);
            self.text(&address)
        });
        self.put_list("metrics.bind", addresses);
    }

    fn readiness(&mut self) {
        let port = self.environment.first(&["ENVOY_STATUS_PORT"]);
        let address = self.address_of(port.unwrap_or_else(|| setting("15021")));
        self.set("readiness.bind", address);
    }

    /// Makes the address of a port that is open to other hosts.
    fn address_of(&mut self, port: Setting) -> Setting {
        let host = match self.flag("IPV6_ENABLED") {
            Some((false, _)) => "0.0.0.0",
            _ => "[::]",
        };
        let value = format!("{host}:{}", port.value);
        Setting { value, ..port }
    }

    fn workers(&mut self) {
        let environment = self.environment;
        let setting = environment.proxy_config("concurrency");
        let setting = setting.or_else(|| environment.first(&["ZTUNNEL_WORKER_THREADS"]));
        let Some(mut setting) = setting else {
            return;
        };
        let percent = setting.value.strip_suffix('%');
        if let Some(percent) = percent.and_then(|percent| percent.trim().parse::<usize>().ok()) {
            let cores = thread::available_parallelism().map_or(1, usize::from);
            let workers = cores.saturating_mul(percent).div_ceil(100).max(1);
            setting.value = workers.to_string();
        }
        let number = self.number(&setting);
        self.put("workers", number);
    }

    /// Makes `drain`: the lag, and the rest of the grace period.
    fn drain(&mut self) {
        let environment = self.environment;
        let lag = environment.first(&["MINIMUM_DRAIN_DURATION"]);
        let time = lag.as_ref().map_or(Ok(DRAIN_LAG), |lag| humantime::parse_duration(&lag.value));
        let deadline = environment.first(&["CONNECTION_TERMINATION_DEADLINE"]);
        // The reader reports a wrong lag.
        let deadline = deadline.or_else(|| self.left_of_grace(time.ok()?));
        self.set("drain.lag", lag);
        self.set("drain.deadline", deadline);
        if environment.has(DATA) {
            let file = environment.path(&format!("{DATA}/strait-drains"));
            self.set("drain.file", setting(&file));
        }
    }

    /// Returns the time that the grace period leaves for open tunnels after the lag.
    fn left_of_grace(&mut self, lag: Duration) -> Option<Setting> {
        let grace = self.environment.first(&["TERMINATION_GRACE_PERIOD_SECONDS"])?;
        let spent = lag.saturating_add(END);
        let Ok(seconds) = grace.value.parse() else {
            let what = format!("is `{}`", grace.shown());
            let how = "a whole number of seconds, such as `30`";
            self.report(&grace, |report| report.error(Position::Line(0), what, how));
            return None;
        };
        let left = Duration::from_secs(seconds).saturating_sub(spent);
        if left.is_zero() {
            let spent = humantime::format_duration(spent);
            let what = format!(
                "is {seconds} s, of which lag and end take {spent}: open tunnels are reset at once"
            );
            let how = "a longer one here and in the pod's terminationGracePeriodSeconds, or a \
                       shorter MINIMUM_DRAIN_DURATION";
            self.warn(&grace, what, how);
        }
        let value = humantime::format_duration(left).to_string();
        Some(Setting { value, ..grace })
    }

    fn log(&mut self, flags: &Flags) {
        let level = self.environment.first(&["RUST_LOG"]).or_else(|| {
            let (value, by) = flags.level.clone()?;
            Some(Setting { value, by: by.to_owned() })
        });
        self.set("log.level", level);
        let variable = self.log_format().map(|format| format.by);
        let by = flags.json.then(|| "--log_as_json".to_owned()).or(variable);
        self.set("log.format", by.map(|by| Setting { value: "json".to_owned(), by }));
    }
}
