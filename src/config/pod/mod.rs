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
        let mut builder =
            Builder { environment, origins: Vec::new(), findings: environment.findings().clone() };
        let entries = vec![
            ("gateway", Some(builder.gateway())),
            ("identity", Some(builder.identity())),
            ("trust", Some(builder.trust())),
            ("listeners", Some(builder.listeners())),
            ("discovery", Some(builder.discovery())),
            ("workers", builder.workers()),
            ("admin", Some(builder.admin())),
            ("metrics", Some(builder.metrics())),
            ("readiness", Some(builder.readiness())),
            ("drain", builder.drain()),
            ("log", builder.log(flags)),
        ];
        let root = builder.map(entries);
        for (name, what) in UNHEARD {
            let setting = environment.first(&[name]);
            if let Some(setting) = setting.filter(|setting| truth(&setting.value) != Some(false)) {
                let what = format!("is set, and {what}");
                builder.warn(&setting, what, "");
            }
        }
        Self { layer: Layer { root, origins: builder.origins }, findings: builder.findings }
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

/// Removes a key of a section.
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

    fn map(&mut self, entries: Vec<(&str, Option<Node>)>) -> Node {
        let entries = entries.into_iter().filter_map(|(key, value)| {
            let value = value?;
            Some(Entry { key: key.into(), position: value.position, value })
        });
        let entries = Kind::Map(entries.collect());
        self.node(DEFAULT, entries)
    }

    fn list(&mut self, items: Vec<Node>) -> Node {
        self.node(DEFAULT, Kind::List(items.into()))
    }

    /// Makes the value of the first variable that is set.
    fn first(&mut self, names: &[&str]) -> Option<Node> {
        let setting = self.environment.first(names)?;
        Some(self.text(&setting))
    }

    fn path(&mut self, relative: &str) -> Node {
        let path = self.environment.path(relative);
        self.text(&setting(&path))
    }

    fn gateway(&mut self) -> Node {
        let cluster = self.text(&self.cluster());
        let names = ["ISTIO_META_NETWORK", "NETWORK", "ISTIO_META_REQUESTED_NETWORK_VIEW"];
        let network = self.environment.first(&names);
        let network = network.or_else(|| self.environment.label(LABELS, NETWORK_LABEL));
        let network = network.map(|network| self.text(&network));
        let locality = locality::locality(self);
        self.map(vec![("cluster", Some(cluster)), ("network", network), ("locality", locality)])
    }

    fn cluster(&self) -> Setting {
        let cluster = self.environment.first(&["ISTIO_META_CLUSTER_ID", "CLUSTER_ID"]);
        cluster.unwrap_or_else(|| setting("Kubernetes"))
    }

    /// Makes `identity`: certificates in files if there are any, else a SPIFFE Workload API if its
    /// socket is mounted, else Istio's authority.
    fn identity(&mut self) -> Node {
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
            let (kind, socket) = (self.text(&setting("spiffe")), Setting { value, ..socket });
            let socket = self.text(&socket);
            return self.map(vec![("kind", Some(kind)), ("socket", Some(socket))]);
        }
        let kind = self.text(&setting("istio-ca"));
        let address = self.address(&["CA_ADDR", "CA_ADDRESS"]);
        let mut entries = vec![("kind", Some(kind)), ("address", Some(address))];
        let san = ["ISTIOD_SAN", "ALT_CA_HOSTNAME"];
        entries.extend(self.control_plane("CA_ROOT_CA", &san, "CA_HEADER_"));
        entries.extend([
            ("trust_domain", Some(self.text(&self.trust_domain()))),
            ("namespace", self.first(&["POD_NAMESPACE"])),
            ("service_account", self.first(&ACCOUNT)),
            ("ttl", self.first(&["SECRET_TTL"])),
        ]);
        if environment.has(MEMORY) {
            let cache = self.path(&format!("{MEMORY}/strait-identity"));
            entries.push(("cache", Some(cache)));
        }
        self.map(entries)
    }

    fn files(&mut self, by: &str, folder: &str) -> Node {
        let setting = |value: &str| Setting { value: value.to_owned(), by: by.to_owned() };
        let mut entries = vec![("kind", Some(self.text(&setting("files"))))];
        for (key, file) in ["chain", "key", "roots"].into_iter().zip(FILES) {
            let path = self.environment.path(&format!("{folder}/{file}"));
            entries.push((key, Some(self.text(&setting(&path)))));
        }
        self.map(entries)
    }

    /// Makes the address of a control plane. ztunnel's variables have it as a URL.
    fn address(&mut self, names: &[&str]) -> Node {
        let environment = self.environment;
        let address = environment.first(names);
        let address = address.or_else(|| environment.proxy_config("discoveryAddress"));
        let mut address = address.unwrap_or_else(|| setting(ISTIOD));
        if let Some(rest) = address.value.strip_prefix("https://") {
            address.value = rest.trim_end_matches('/').to_owned();
        }
        self.text(&address)
    }

    /// Makes the keys that istiod as the source of the mesh and as the authority have in common.
    fn control_plane(
        &mut self,
        roots: &str,
        san: &[&str],
        headers: &str,
    ) -> Vec<(&'static str, Option<Node>)> {
        let roots = self.first(&[roots]);
        let roots = roots.unwrap_or_else(|| self.path(ROOTS));
        let token = self.first(&["AUTH_TOKEN"]);
        let token = token.unwrap_or_else(|| self.path(TOKEN));
        let headers = self.environment.prefixed(headers);
        let headers = headers.into_iter();
        let headers = headers.map(|(name, setting)| (name, Some(self.text(&setting))));
        let headers: Vec<_> = headers.collect();
        let headers = (!headers.is_empty()).then(|| self.map(headers));
        vec![
            ("roots", Some(roots)),
            ("token", Some(token)),
            ("san", self.first(san)),
            ("headers", headers),
        ]
    }

    fn discovery(&mut self) -> Node {
        if let Some(path) = self.first(&["LOCAL_XDS_PATH"]) {
            let kind = self.text(&setting("file"));
            return self.map(vec![("kind", Some(kind)), ("path", Some(path))]);
        }
        let kind = self.text(&setting("istio"));
        let address = self.address(&["XDS_ADDRESS"]);
        let mut entries = vec![("kind", Some(kind)), ("address", Some(address))];
        let san = ["ISTIOD_SAN", "ALT_XDS_HOSTNAME"];
        entries.extend(self.control_plane("XDS_ROOT_CA", &san, "XDS_HEADER_"));
        if self.environment.has(DATA) {
            let cache = self.path(&format!("{DATA}/strait-mesh"));
            entries.push(("cache", Some(cache)));
        }
        self.map(entries)
    }

    fn trust_domain(&self) -> Setting {
        let domain = self.environment.first(&["TRUST_DOMAIN"]);
        domain.unwrap_or_else(|| setting(TRUST_DOMAIN))
    }

    /// Makes `trust`: the pod's own domain, which stands for its cluster, and others, which stand
    /// for themselves.
    fn trust(&mut self) -> Node {
        let own = self.trust_domain();
        let (name, cluster) = (self.text(&own), self.text(&self.cluster()));
        let own_entry = vec![("name", Some(name)), ("cluster", Some(cluster))];
        let mut domains = vec![self.map(own_entry)];
        let others = self.environment.first(&["TRUST_DOMAINS"]);
        let mut seen = vec![own.value];
        for other in others.iter().flat_map(Setting::items) {
            if !seen.contains(&other.value) {
                let name = self.text(&other);
                domains.push(self.map(vec![("name", Some(name))]));
                seen.push(other.value);
            }
        }
        let (domains, crl) = (self.list(domains), self.crl());
        let skip = self.flag("SKIP_VALIDATE_TRUST_DOMAIN");
        let skip = skip.map(|(skip, by)| self.node(&by, Kind::Bool(skip)));
        self.map(vec![("domains", Some(domains)), ("crl", crl), ("skip_validation", skip)])
    }

    /// Makes `trust.crl` of `CRL_PATH`, as lenient as ztunnel is.
    fn crl(&mut self) -> Option<Node> {
        let file = self.environment.first(&["CRL_PATH"])?;
        let accept = Setting { value: "accept".to_owned(), by: file.by.clone() };
        let files = vec![self.text(&file)];
        let files = self.list(files);
        let (stale, missing) = (self.text(&accept), self.text(&accept));
        Some(self.map(vec![
            ("files", Some(files)),
            ("on_stale", Some(stale)),
            ("on_missing", Some(missing)),
        ]))
    }

    fn listeners(&mut self) -> Node {
        let name = self.text(&setting("cross-network"));
        let address = self.address_of(setting("15008"));
        let listener = self.map(vec![("name", Some(name)), ("bind", Some(address))]);
        self.list(vec![listener])
    }

    /// Makes `metrics`: the port of Istio's agent, in the pod's annotations, and that of Envoy,
    /// which the pod declares. Monitoring may use either.
    fn metrics(&mut self) -> Node {
        let envoy = self.environment.first(&["ENVOY_PROMETHEUS_PORT"]);
        let ports = [setting("15020"), envoy.unwrap_or_else(|| setting("15090"))];
        let addresses = ports.map(|port| self.address_of(port));
        let bind = self.list(addresses.into());
        self.map(vec![("bind", Some(bind))])
    }

    fn readiness(&mut self) -> Node {
        let port = self.environment.first(&["ENVOY_STATUS_PORT"]);
        let address = self.address_of(port.unwrap_or_else(|| setting("15021")));
        self.map(vec![("bind", Some(address))])
    }

    /// Makes the address of a port that is open to other hosts.
    fn address_of(&mut self, port: Setting) -> Node {
        let host = match self.flag("IPV6_ENABLED") {
            Some((false, _)) => "0.0.0.0",
            _ => "[::]",
        };
        let value = format!("{host}:{}", port.value);
        self.text(&Setting { value, ..port })
    }

    fn admin(&mut self) -> Node {
        let address = self.text(&setting("127.0.0.1:15000"));
        self.map(vec![("bind", Some(address))])
    }

    fn workers(&mut self) -> Option<Node> {
        let environment = self.environment;
        let setting = environment.proxy_config("concurrency");
        let mut setting = setting.or_else(|| environment.first(&["ZTUNNEL_WORKER_THREADS"]))?;
        let percent = setting.value.strip_suffix('%');
        if let Some(percent) = percent.and_then(|percent| percent.trim().parse::<usize>().ok()) {
            let cores = thread::available_parallelism().map_or(1, usize::from);
            let workers = cores.saturating_mul(percent).div_ceil(100).max(1);
            setting.value = workers.to_string();
        }
        Some(self.number(&setting))
    }

    /// Makes `drain`: the lag, and the rest of the grace period.
    fn drain(&mut self) -> Option<Node> {
        let environment = self.environment;
        let lag = environment.first(&["MINIMUM_DRAIN_DURATION"]);
        let time = lag.as_ref().map_or(Ok(DRAIN_LAG), |lag| humantime::parse_duration(&lag.value));
        let deadline = environment.first(&["CONNECTION_TERMINATION_DEADLINE"]);
        // The reader reports a wrong lag.
        let deadline = deadline.or_else(|| self.left_of_grace(time.ok()?));
        if lag.is_none() && deadline.is_none() {
            return None;
        }
        let lag = lag.map(|lag| self.text(&lag));
        let deadline = deadline.map(|deadline| self.text(&deadline));
        Some(self.map(vec![("lag", lag), ("deadline", deadline)]))
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

    fn log(&mut self, flags: &Flags) -> Option<Node> {
        let level = self.environment.first(&["RUST_LOG"]).or_else(|| {
            let (value, by) = flags.level.clone()?;
            let by = by.to_owned();
            Some(Setting { value, by })
        });
        let format = self.log_format();
        let by = match (flags.json, format) {
            (true, _) => Some("--log_as_json".to_owned()),
            (false, format) => format.map(|format| format.by),
        };
        let format = by.map(|by| self.node(&by, Kind::Text("json".into())));
        let level = level.map(|level| self.text(&level));
        if level.is_none() && format.is_none() {
            return None;
        }
        Some(self.map(vec![("level", level), ("format", format)]))
    }
}
