//! Two clusters on one machine: certificates, endpoints, and the gateway's process.

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use crate::config::IdentityFiles;
use crate::tls::{self, IdentityMaterial, TrustedDomain};
use crate::tools::certs;
use crate::tools::hbone::{self, IncomingTunnel};

pub(super) const ECHO: &str = "echo.app.svc.cluster.local:80";
/// Service of the mesh that is not exposed.
pub(super) const UNEXPOSED: &str = "secret.app.svc.cluster.local:80";
pub(super) const GATEWAY_ID: &str = "spiffe://east.local/ns/istio-system/sa/eastwest";
pub(super) const ENDPOINT_ID: &str = "spiffe://east.local/ns/app/sa/echo";
/// Endpoint of weight 1; [`LARGE`] has weight 3.
pub(super) const SMALL: &str = "echo-1";
const LARGE: &str = "echo-3";

const HBONE_PORT: u16 = 15008;
const START_DEADLINE: Duration = Duration::from_secs(10);
const STOP_DEADLINE: Duration = Duration::from_secs(10);
/// Deadline for a count to reach its value. A count is at most one turn of a worker behind, unless
/// the machine is very busy.
const SETTLE_DEADLINE: Duration = Duration::from_secs(5);

/// Reads a certificate of the set that `strait certs` writes.
pub(super) fn identity(folder: &Path, name: &str) -> anyhow::Result<IdentityMaterial> {
    let file = |name: &str| folder.join(name);
    let (chain, key) = (file(&format!("{name}.crt")), file(&format!("{name}.key")));
    Ok(IdentityMaterial::load(&IdentityFiles { chain, key, roots: file("root.crt") })?)
}

pub(super) struct DemoEnvironment {
    pub(super) gateway: SocketAddr,
    endpoints: Vec<(&'static str, JoinHandle<()>)>,
    process: Child,
    folder: TempDir,
}

impl DemoEnvironment {
    /// Makes certificates, starts two endpoints and the gateway, and waits until it is ready.
    pub(super) async fn start() -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new().prefix("strait-demo-").tempdir()?;
        certs::write_set(folder.path(), &["east", "west"].map(String::from))?;
        let (net, small) = find_free_net().await?;
        let large = TcpListener::bind((host(net, 12), HBONE_PORT)).await?;
        let endpoints = vec![
            (SMALL, endpoint(folder.path(), small, SMALL)?),
            (LARGE, endpoint(folder.path(), large, LARGE)?),
        ];
        let ip = host(net, 1);
        write_files(folder.path(), net)?;
        let log = File::create(folder.path().join("gateway.log"))?;
        let process = Command::new(std::env::current_exe()?)
            .args(["run", "-c"])
            .arg(folder.path().join("strait.yaml"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .context("cannot start the gateway")?;
        let gateway = SocketAddr::new(ip, HBONE_PORT);
        let mut world = Self { gateway, endpoints, process, folder };
        world.wait_until_ready().await?;
        Ok(world)
    }

    async fn wait_until_ready(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + START_DEADLINE;
        loop {
            let ready = self.get(15021, "/healthz/ready").await;
            if matches!(&ready, Ok(body) if body == "ready\n") {
                return Ok(());
            }
            let exited = self.process.try_wait()?;
            if exited.is_some() || Instant::now() > deadline {
                let log = std::fs::read_to_string(self.log_file()).unwrap_or_default();
                bail!("the gateway did not become ready ({exited:?}, {ready:?}); its log:\n{log}");
            }
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// Kills up to `count` endpoints with all their connections; returns their names.
    pub(super) async fn kill(&mut self, count: usize) -> Vec<&'static str> {
        let mut killed = Vec::new();
        // Kill the larger one first: its loss has more effect.
        for (name, task) in self.endpoints.iter_mut().rev().take(count) {
            task.abort();
            // The sockets are closed once the task has ended.
            let _ = task.await;
            killed.push(*name);
        }
        killed
    }

    pub(super) fn has_exited(&mut self) -> bool {
        !matches!(self.process.try_wait(), Ok(None))
    }

    /// Stops the gateway by SIGTERM, and by SIGKILL if that takes too long.
    pub(super) async fn stop(mut self) {
        let pid = self.process.id().and_then(|id| i32::try_from(id).ok());
        if let Some(pid) = pid.and_then(rustix::process::Pid::from_raw) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        if timeout(STOP_DEADLINE, self.process.wait()).await.is_err() {
            let _ = self.process.kill().await;
        }
    }

    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(super) fn log_file(&self) -> PathBuf {
        self.folder.path().join("gateway.log")
    }

    pub(super) fn metrics_url(&self) -> String {
        format!("http://{}:15020/metrics", self.gateway.ip())
    }

    pub(super) fn admin_url(&self) -> String {
        format!("http://{}:15000", self.gateway.ip())
    }

    pub(super) fn dump_url(&self) -> String {
        self.admin_url() + "/config_dump"
    }

    pub(super) async fn metric(&self, name: &str) -> anyhow::Result<f64> {
        // Values of the admin port are current; those of the metrics port may be a second old.
        let text = self.get(15000, "/stats/prometheus").await?;
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|value| value.trim().parse().ok())
            .with_context(|| format!("the gateway's metrics have no {name}"))
    }

    /// Returns the value of one metric once it satisfies `wanted`, or its last value at the
    /// deadline. A client sees the end of a tunnel a moment before the gateway counts it.
    pub(super) async fn wait_for_metric(
        &self,
        name: &str,
        wanted: impl Fn(f64) -> bool,
    ) -> anyhow::Result<f64> {
        settled(async || self.metric(name).await, |value| wanted(*value)).await
    }

    /// Returns the number of log lines of completed tunnels once it reaches `wanted`, or the last
    /// number at the deadline. The gateway writes its log in a separate thread, after counting.
    pub(super) async fn wait_for_completed_lines(&self, wanted: usize) -> anyhow::Result<usize> {
        let is_completed = |line: &&str| {
            line.contains("connection complete") && line.contains("reason=\"completed\"")
        };
        let count = async || {
            let log = std::fs::read_to_string(self.log_file()).context("the gateway's log")?;
            Ok(log.lines().filter(is_completed).count())
        };
        settled(count, |lines| *lines >= wanted).await
    }

    async fn get(&self, port: u16, path: &str) -> anyhow::Result<String> {
        let ask = async {
            let mut stream = TcpStream::connect((self.gateway.ip(), port)).await?;
            let request = format!("GET {path} HTTP/1.0\r\nhost: localhost\r\n\r\n");
            stream.write_all(request.as_bytes()).await?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await?;
            anyhow::Ok(answer)
        };
        let answer = timeout(Duration::from_secs(5), ask).await??;
        let (_, body) = answer.split_once("\r\n\r\n").context("no HTTP answer")?;
        Ok(body.to_owned())
    }
}

/// Reads a value until it is as wanted, or until the deadline.
async fn settled<T>(
    read: impl AsyncFn() -> anyhow::Result<T>,
    is_wanted: impl Fn(&T) -> bool,
) -> anyhow::Result<T> {
    let deadline = Instant::now() + SETTLE_DEADLINE;
    loop {
        let value = read().await?;
        if is_wanted(&value) || Instant::now() > deadline {
            return Ok(value);
        }
        sleep(Duration::from_millis(20)).await;
    }
}

/// Finds an unused part of 127.0.0.0/8, reserved by the returned listener of its first endpoint.
async fn find_free_net() -> anyhow::Result<([u8; 2], TcpListener)> {
    for _ in 0..100 {
        let net = [fastrand::u8(1..=250), fastrand::u8(..)];
        let gateway = TcpListener::bind((host(net, 1), HBONE_PORT)).await;
        let endpoint = TcpListener::bind((host(net, 11), HBONE_PORT)).await;
        if let (Ok(_), Ok(endpoint)) = (gateway, endpoint) {
            return Ok((net, endpoint));
        }
    }
    bail!("no address of 127.0.0.0/8 has port {HBONE_PORT} free; is the loopback interface up?")
}

fn host([second, third]: [u8; 2], last: u8) -> IpAddr {
    Ipv4Addr::new(127, second, third, last).into()
}

/// Starts an endpoint that terminates the inner mTLS and answers a request with its own name and
/// the request.
fn endpoint(
    folder: &Path,
    listener: TcpListener,
    name: &'static str,
) -> anyhow::Result<JoinHandle<()>> {
    let material = identity(folder, "endpoint")?;
    let west = TrustedDomain { name: "west.local".into(), issuers: None, roots: None };
    let tls = tls::endpoint_server_config(&material, vec![west])?;
    Ok(tokio::spawn(hbone::serve(listener, tls, move |incoming: IncomingTunnel| async move {
        let mut tunnel = incoming.tunnel;
        let mut question = String::new();
        // A truncated request gets no answer, and its client sees the reset.
        if tunnel.read_to_string(&mut question).await.is_ok() {
            let answer = format!("{name} {question}");
            let _ = tunnel.write_all(answer.as_bytes()).await;
            let _ = tunnel.shutdown().await;
        }
    })))
}

fn write_files(folder: &Path, net: [u8; 2]) -> anyhow::Result<()> {
    let (gateway, small, large) = (host(net, 1), host(net, 11), host(net, 12));
    let write = |name: &str, text: &str| {
        std::fs::write(folder.join(name), text).with_context(|| format!("cannot write {name}"))
    };
    write(
        "strait.yaml",
        &format!(
            "gateway: {{cluster: east, network: east}}
identity: {{kind: files, chain: gateway.crt, key: gateway.key, roots: root.crt}}
trust:
  domains:
    - {{name: east.local, cluster: east}}
    - {{name: west.local, cluster: west}}
listeners:
  - {{name: cross-network, bind: \"{gateway}:15008\", protocol: hbone}}
discovery: {{kind: file, path: mesh.yaml}}
exposure:
  default: none
  services:
    - service: \"{ECHO}\"
      to: [{{cluster: west, namespaces: [shop]}}]
      names: [\"echo.global:80\"]
dial: {{allow: [\"127.0.0.0/8\"]}}
admin: {{bind: \"{gateway}:15000\"}}
metrics: {{bind: \"{gateway}:15020\"}}
readiness: {{bind: \"{gateway}:15021\"}}
drain: {{lag: 0s, deadline: 2s}}
log: {{level: info, format: text}}
"
        ),
    )?;
    let workload = |name: &str, ip: IpAddr, capacity: u8| {
        format!(
            "  - {{uid: east/{name}, name: {name}, namespace: app, serviceAccount: echo,
     trustDomain: east.local, clusterId: east, network: east, protocol: HBONE,
     workloadIps: [{ip}], capacity: {capacity},
     services: {{app/echo.app.svc.cluster.local: {{80: 8080}},
                app/secret.app.svc.cluster.local: {{80: 8080}}}}}}\n"
        )
    };
    let service = |name: &str, vip: u8| {
        format!(
            "  - {{name: {name}, namespace: app, hostname: {name}.app.svc.cluster.local, \
             vips: [east/240.0.0.{vip}], ports: {{80: 8080}}}}\n"
        )
    };
    let workloads = workload(SMALL, small, 1) + &workload(LARGE, large, 3);
    let services = service("echo", 1) + &service("secret", 2);
    write("mesh.yaml", &format!("services:\n{services}workloads:\n{workloads}policies: []\n"))
}
