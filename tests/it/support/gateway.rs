//! The gateway's process, with its own folder.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use strait::tools::hbone::Client;
use tempfile::TempDir;
use tokio::process::{Child, Command};
use tokio::time::{Instant, timeout};

use super::identities::{CLIENT, GATEWAY, Identities};
use super::process::{WAIT_MAX, http, send_signal, strait, until};
use super::{ECHO, Net, memory};

/// Limit of the time in which a restarted container is ready from its cache on disk: a second in a
/// release build on an otherwise idle machine. A debug build beside other tests is slower. A wait
/// for an answer of istiod is 15 s.
pub const RESTART_MAX: Duration = Duration::from_secs(5);

/// Number of lines of the log that a failed test prints.
const LOG_LINES: usize = 40;

/// Settings of a test's gateway that differ from the defaults.
pub struct Settings<'a> {
    pub net: Net,
    pub identities: &'a Identities,
    /// List entries of `exposure.services` in `strait.yaml`.
    pub exposure: String,
    /// More listeners, as YAML list entries.
    pub listeners: String,
    /// More top-level lines of `strait.yaml`.
    pub more: String,
    /// `dial.allow`, as a YAML list.
    pub allow: &'static str,
    /// Program to run: this build, or another one for comparisons.
    pub program: PathBuf,
    /// Limit of open files of the process.
    pub descriptors: u32,
    /// `--take-over` of the process.
    pub take_over: Option<PathBuf>,
    /// Command that enters the process's surroundings, such as a cgroup or a namespace, and then
    /// executes its further arguments.
    pub inside: Vec<String>,
    /// The mesh file.
    pub mesh: String,
}

impl<'a> Settings<'a> {
    /// Exposes [`ECHO`] and its alias to cluster west; it has no endpoints yet.
    pub fn new(net: Net, identities: &'a Identities) -> Self {
        Self {
            net,
            identities,
            exposure: format!(
                "    - service: \"{ECHO}\"\n      to: [{{cluster: west}}]\n      \
                 names: [\"echo.global:80\"]\n"
            ),
            listeners: String::new(),
            more: "drain: {lag: 0s, deadline: 2s}\n".to_owned(),
            allow: "[\"127.0.0.0/8\"]",
            program: binary(),
            descriptors: 4096,
            take_over: None,
            inside: Vec::new(),
            mesh: mesh(&[]),
        }
    }

    /// Endpoints of [`ECHO`]: host, capacity, and `HBONE` or `TCP` (then on [`endpoint_port`]).
    ///
    /// [`endpoint_port`]: super::endpoint_port
    pub fn endpoints(mut self, endpoints: &[(u8, u32, &str)]) -> Self {
        let endpoints: Vec<_> = endpoints
            .iter()
            .map(|&(host, capacity, protocol)| (self.net.ip(host), capacity, protocol))
            .collect();
        self.mesh = mesh(&endpoints);
        self
    }
}

/// A mesh file with the service [`ECHO`], a service that is not exposed, and these endpoints.
fn mesh(endpoints: &[(IpAddr, u32, &str)]) -> String {
    let port = super::endpoint_port();
    let mut text = format!(
        "services:
  - {{name: echo, namespace: app, hostname: echo.app.svc.cluster.local, vips: [east/240.0.0.1],
     ports: {{80: {port}}}}}
  - {{name: secret, namespace: app, hostname: secret.app.svc.cluster.local, vips: [],
     ports: {{80: {port}}}}}
policies: []
"
    );
    text += if endpoints.is_empty() { "workloads: []\n" } else { "workloads:\n" };
    for (ip, capacity, protocol) in endpoints {
        let _ = writeln!(
            text,
            "  - {{uid: \"east/{ip}\", name: \"pod-{ip}\", namespace: app, serviceAccount: echo,
     trustDomain: east.local, clusterId: east, network: east, workloadIps: [\"{ip}\"],
     protocol: {protocol}, capacity: {capacity}, workloadName: echo,
     services: {{app/echo.app.svc.cluster.local: {{80: {port}}},
       app/secret.app.svc.cluster.local: {{80: {port}}}}}}}"
        );
    }
    text
}

/// Running gateway, killed on drop.
pub struct Gateway {
    /// Dropped before the folder.
    _log: Log,
    pub folder: TempDir,
    pub address: SocketAddr,
    process: Child,
}

/// Log of the gateway. A failed test prints its end, which has the reasons of tunnels.
struct Log(PathBuf);

#[expect(clippy::print_stdout, reason = "libtest prints it with the failure")]
impl Drop for Log {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = std::fs::read_to_string(&self.0).unwrap_or_default();
            let first = log.lines().count().saturating_sub(LOG_LINES);
            log.lines().skip(first).for_each(|line| println!("{line}"));
        }
    }
}

impl Gateway {
    /// Writes the files, starts the process and waits until it is ready.
    pub async fn start(settings: &Settings<'_>) -> Self {
        let mut gateway = Self::spawn(settings, |_| {});
        gateway.ready().await;
        gateway
    }

    /// Writes the files, lets `prepare` change them in their folder, and starts the process.
    pub fn spawn(settings: &Settings<'_>, prepare: impl FnOnce(&Path)) -> Self {
        let folder = Self::folder(settings);
        prepare(folder.path());
        let file = folder.path().join("strait.yaml");
        Self::spawn_in(folder, settings, |command| {
            command.args(["run", "-c"]).arg(file);
            if let Some(path) = &settings.take_over {
                command.arg("--take-over").arg(path);
            }
        })
    }

    /// Returns a folder with the files.
    pub fn folder(settings: &Settings<'_>) -> TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| {
            std::fs::write(folder.path().join(name), text).expect("a file");
        };
        let leaf = settings.identities.leaf(GATEWAY);
        write("root.crt", &settings.identities.root);
        write("gateway.crt", &leaf.chain_pem);
        write("gateway.key", &leaf.key_pem);
        write("mesh.yaml", &settings.mesh);
        write("strait.yaml", &strait_yaml(settings));
        folder
    }

    /// Starts the process in a folder. `configure` adds arguments, and an environment if needed.
    pub fn spawn_in(
        folder: TempDir,
        settings: &Settings<'_>,
        configure: impl FnOnce(&mut Command),
    ) -> Self {
        let log = std::fs::File::create(folder.path().join("log")).expect("a log file");
        // prlimit is in util-linux, which every Linux distribution has.
        let mut words = settings.inside.iter().map(String::as_str).chain(["prlimit"]);
        let mut command = Command::new(words.next().expect("a program"));
        command.args(words);
        command.arg(format!("--nofile={0}:{0}", settings.descriptors)).arg(&settings.program);
        configure(&mut command);
        let process = command
            .current_dir(folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .expect("the gateway's process");
        let address = settings.net.address(1, 15008);
        Self { _log: Log(folder.path().join("log")), folder, address, process }
    }

    /// Waits until the gateway is ready.
    pub async fn ready(&mut self) {
        self.ready_within(WAIT_MAX).await;
    }

    /// Waits for `time` at most, for gateways that first back off from a failure.
    pub async fn ready_within(&mut self, time: Duration) {
        let deadline = Instant::now() + time;
        while self.readiness().await.0 != 200 {
            let exited = self.process.try_wait().expect("a status");
            let log = self.log();
            assert!(exited.is_none(), "the gateway is gone, {exited:?}:\n{log}");
            assert!(Instant::now() < deadline, "the gateway is not ready:\n{log}");
            // deadline: the state of another process can only be polled.
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Connects a client of cluster west.
    pub async fn client(&self, identities: &Identities) -> Client {
        self.client_as(identities, CLIENT).await
    }

    /// Connects a client with another identity.
    pub async fn client_as(&self, identities: &Identities, id: &str) -> Client {
        let tls = identities.client(id, GATEWAY);
        Client::connect(self.address, &tls).await.expect("a connection")
    }

    /// Returns the status and body of the readiness probe.
    pub async fn readiness(&self) -> (u16, String) {
        self.http(15021, "GET", "/healthz/ready").await
    }

    /// Sends a request to one of the gateway's HTTP ports. The status is 0 if nothing listens.
    pub async fn http(&self, port: u16, method: &str, path: &str) -> (u16, String) {
        http(SocketAddr::new(self.address.ip(), port), method, path).await
    }

    /// Returns all metrics from the admin port. Those of the metrics port may be a second old; in a
    /// lab, nothing else can be reached.
    pub async fn scrape(&self) -> String {
        let port = if self.address.ip().is_loopback() { 15000 } else { 15020 };
        let (status, text) = self.http(port, "GET", "/stats/prometheus").await;
        assert_eq!(status, 200, "{text}");
        text
    }

    /// Returns the value of a metric with exactly these labels, or 0 if it does not exist (yet).
    pub async fn metric(&self, name: &str) -> f64 {
        let text = self.scrape().await;
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.map_or(0.0, |value| value.parse().expect("a number"))
    }

    /// Returns the number of tunnels that ended for a reason.
    pub async fn tunnels(&self, reason: &str) -> f64 {
        self.tunnels_by_reason().await.get(reason).copied().unwrap_or(0.0)
    }

    /// Returns the number of tunnels that have ended so far, by reason.
    pub async fn tunnels_by_reason(&self) -> BTreeMap<String, f64> {
        let mut ends = BTreeMap::new();
        for line in self.scrape().await.lines() {
            let rest = line.strip_prefix("strait_tunnels_total{reason=\"");
            let Some((reason, rest)) = rest.and_then(|rest| rest.split_once("\",")) else {
                continue;
            };
            let (_, count) = rest.rsplit_once(' ').expect("a value");
            let count: f64 = count.parse().expect("a number");
            if count > 0.0 {
                *ends.entry(reason.to_owned()).or_default() += count;
            }
        }
        ends
    }

    /// Waits until this many connections and tunnels are open.
    pub async fn wait_until_open(&self, connections: u32, tunnels: u32) {
        let open = async || {
            let connections = self.metric("strait_connections_open").await;
            (connections, self.metric("strait_tunnels_open").await)
        };
        let wanted = (f64::from(connections), f64::from(tunnels));
        until("connections and tunnels", open, |&open| open == wanted).await;
    }

    /// Returns the number of handshakes that were refused for a reason.
    pub async fn refused_handshakes(&self, reason: &str) -> f64 {
        self.metric(&format!("strait_handshakes_refused_total{{reason=\"{reason}\"}}")).await
    }

    /// Returns the path of a file in the gateway's folder.
    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the gateway's log so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.file("log")).expect("the log")
    }

    /// Waits until the gateway has logged `text`. The gateway writes its log in a separate thread.
    pub async fn logged(&self, text: &str) {
        until(text, async || self.log(), |log| log.contains(text)).await;
    }

    /// Returns the private dirty memory of the process, in bytes.
    pub fn private_dirty(&self) -> u64 {
        memory::private_dirty(self.process.id().expect("a running gateway"))
    }

    /// Returns the processor time of the process so far.
    pub fn processor_time(&self) -> Duration {
        memory::processor_time(self.process.id().expect("a running gateway"))
    }

    /// Returns the number of open descriptors of the process.
    pub fn descriptors(&self) -> usize {
        let process = self.process.id().expect("a running gateway");
        std::fs::read_dir(format!("/proc/{process}/fd")).expect("a folder").count()
    }

    /// Returns the names of the threads of the process.
    pub fn thread_names(&self) -> Vec<String> {
        memory::thread_names(self.process.id().expect("a running gateway"))
    }

    /// Runs a command of strait against this gateway's admin port. Returns its exit code, stdout
    /// and stderr.
    pub async fn run_command(&self, args: &[&str]) -> (i32, String, String) {
        let admin = SocketAddr::new(self.address.ip(), 15000).to_string();
        let output = strait().args(args).args(["--admin", &admin]).output();
        let output = timeout(WAIT_MAX, output).await;
        let output = output.expect("an end in time").expect("its output");
        let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
        let code = output.status.code().expect("an exit code");
        (code, text(output.stdout), text(output.stderr))
    }

    /// Sends a signal.
    pub fn signal(&self, signal: rustix::process::Signal) {
        send_signal(&self.process, signal);
    }

    /// Returns whether the process still runs.
    pub fn is_running(&mut self) -> bool {
        self.process.try_wait().expect("a status").is_none()
    }

    /// Kills the process and waits for its end: a successor finds its addresses free.
    pub async fn kill(mut self) {
        self.signal(rustix::process::Signal::KILL);
        self.exited().await;
    }

    /// Waits for the process's end.
    pub async fn exited(&mut self) -> ExitStatus {
        self.process.wait().await.expect("an exit status")
    }
}

/// Returns the gateway's binary: this build's, or the one at `STRAIT_GATEWAY` for comparisons.
fn binary() -> PathBuf {
    let other = std::env::var_os("STRAIT_GATEWAY");
    other.map_or_else(|| env!("CARGO_BIN_EXE_strait").into(), Into::into)
}

/// Raises the limit of open files of this process, which holds the other ends of the connections.
pub fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let files = getrlimit(Resource::Nofile);
    let current = files.maximum;
    setrlimit(Resource::Nofile, Rlimit { current, ..files }).expect("more descriptors");
}

/// Writes `text` to `path` by a rename, as tools do that never leave partial files.
pub fn replace(path: &Path, text: &str) {
    let new = path.with_extension("new");
    std::fs::write(&new, text).expect("a new file");
    std::fs::rename(new, path).expect("a rename");
}

/// Returns the configuration of a gateway on host 1 of its net.
fn strait_yaml(settings: &Settings<'_>) -> String {
    let ip = settings.net.ip(1);
    // The admin port may be on loopback addresses only.
    let admin = if ip.is_loopback() { ip } else { Ipv4Addr::LOCALHOST.into() };
    let Settings { exposure, listeners, more, allow, .. } = settings;
    format!(
        "gateway: {{cluster: east, network: east}}
identity: {{kind: files, chain: gateway.crt, key: gateway.key, roots: root.crt}}
trust:
  domains:
    - {{name: east.local, cluster: east}}
    - {{name: west.local, cluster: west}}
listeners:
  - {{name: cross-network, bind: \"{ip}:15008\", protocol: hbone}}
{listeners}discovery: {{kind: file, path: mesh.yaml}}
exposure:
  default: none
  services:
{exposure}dial: {{allow: {allow}}}
admin: {{bind: \"{admin}:15000\"}}
metrics: {{bind: \"{ip}:15020\"}}
readiness: {{bind: \"{ip}:15021\"}}
{more}"
    )
}
