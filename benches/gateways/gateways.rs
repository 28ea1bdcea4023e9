//! Gateways and the endpoints behind them, each a process.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio::process::{Child, Command};

use crate::apart::{APART, APART_PORTS, apart_as_echo, mesh_with_apart};
use crate::command::{Load, Serve};
use crate::common::machine::{CPU_OF_GATEWAYS, processors};
use crate::common::process::Process;
use crate::copy_loop::Forward;
use crate::envoy::{self, Envoy};
use crate::figures::Limit;
use crate::link::Link;
use crate::measurement::Held;
use crate::peers::{self, Peer};
use crate::rows::{BESIDE_BEFORE, Kind, Row, Transport};
use crate::support::{GATEWAY, Gateway, Net, Settings, endpoint_port, identities, until};

/// Names of services.
const SERVICES: [&str; 4] = ["echo", "many", "sink", "source"];
/// Services of one endpoint: the name, which is also the mode of `strait load serve`, the last byte
/// of its address, and its placeholder in configurations.
const ENDPOINTS: [(&str, u8, &str); 3] =
    [("echo", 11, "@ECHO@"), ("sink", 12, "@SINK@"), ("source", 13, "@SOURCE@")];
/// Last bytes of the addresses of service `many`, which are echoes too. Each tunnel that ends keeps
/// a port to its endpoint for a minute, and the kernel finds 14,000 ports quickly for one address.
/// A round of churn needs more, and would measure the search for them.
const MANY: RangeInclusive<u8> = 21..=28;
/// Limit of descriptors, more than all idle tunnels need.
const DESCRIPTORS: u32 = 16_384;
/// Strait's settings beyond those of the tests' gateways: no access log, as its peers have none.
const STRAIT: &str = "log: {level: warn}\n";
/// Configuration of the first of two Envoys.
const TRANSIT_YAML: &str = include_str!("envoy_transit.yaml");
/// Ports of the listeners.
const HBONE: u16 = 15008;
const SNI: u16 = 15443;
/// Port of endpoints behind TLS passthrough.
const AFTER_HELLO: u16 = 9001;
/// Limit of streams of one connection to the second of two gateways, which all gateways announce.
const STREAMS: u32 = 256;
/// Identity of the second of two gateways.
const NEXT: &str = "spiffe://west.local/ns/istio-system/sa/eastwest";
/// Lines that let HAProxy splice, in its global section and its defaults.
const SPLICE: [&str; 2] =
    ["    tune.pipesize 1048576", "    option splice-request\n    option splice-response"];

/// Endpoints, and everything needed to start gateways in front of them.
pub struct BenchEnvironment {
    net: Net,
    /// Addresses of another build or of two workers, of which no run has both, and of four workers.
    variants: [Net; 2],
    /// Addresses of two gateways in a row.
    hops: [Net; 2],
    /// Another build of Strait.
    before: Option<PathBuf>,
    envoy: PathBuf,
    peers: BTreeMap<Kind, PathBuf>,
    link: Option<Link>,
    _endpoints: Vec<Serve>,
    processes: Vec<Process>,
}

/// Running gateway, killed on drop.
pub struct Running {
    pub kind: Kind,
    pub process: Process,
    /// Second of two gateways in a row.
    next: Option<Process>,
    hbone: Load,
    /// Load over the link, if there is one.
    linked: Option<Load>,
    /// Loads of bare connections to each of [`SERVICES`].
    bare: [Load; 4],
    program: Program,
}

enum Program {
    Strait(Gateway),
    TwoStraits([Gateway; 2]),
    Envoy { _process: Envoy },
    TwoEnvoys([Envoy; 2]),
    Peer { _process: Peer },
    CopyLoop { _process: Child },
    Direct,
}

impl BenchEnvironment {
    /// Starts the endpoints, and the long link if a row needs it.
    pub async fn start(envoy: &Path, before: Option<PathBuf>, needs_link: bool) -> Self {
        let net = Net::new();
        let (mut endpoints, mut processes) = (Vec::new(), Vec::new());
        let many = MANY.map(|host| ("echo", host));
        for (mode, host) in ENDPOINTS.map(|(mode, host, _)| (mode, host)).into_iter().chain(many) {
            let plain = net.address(host, endpoint_port());
            let passed = net.address(host, AFTER_HELLO);
            endpoints.push(Serve::plain(plain, mode).await);
            endpoints.push(Serve::after_hello(passed, mode).await);
            processes.extend([plain, passed].map(|at| Process::child(&at.to_string())));
        }
        let peers = Kind::ALL.into_iter();
        Self {
            net,
            variants: [Net::new(), Net::new()],
            hops: [Net::new(), Net::new()],
            before,
            envoy: envoy.to_owned(),
            peers: peers.filter_map(|kind| Some((kind, peers::program(kind)?))).collect(),
            link: if needs_link { link().await } else { None },
            _endpoints: endpoints,
            processes,
        }
    }

    /// Returns true if this machine has such a gateway.
    pub fn has(&self, kind: Kind) -> bool {
        match kind {
            Kind::Before => self.before.is_some(),
            Kind::Haproxy | Kind::HaproxySplice | Kind::Nginx => self.peers.contains_key(&kind),
            _ => true,
        }
    }

    /// Returns true if this machine can carry a row's bytes.
    pub fn carries(&self, way: Transport) -> bool {
        way != Transport::LossyLink || self.link.is_some()
    }

    /// Returns peers that replace those of every row.
    pub fn beside(&self) -> Option<&'static [(Kind, Limit)]> {
        self.before.as_ref().map(|_| &BESIDE_BEFORE[..])
    }

    /// Returns the versions, such as `Envoy 1.40.0`.
    pub async fn versions(&self) -> Vec<String> {
        let mut versions = vec![format!("Envoy {}", envoy::version(&self.envoy).await)];
        for (kind, program) in &self.peers {
            let version = peers::version(program).await;
            versions.push(format!("{} {version}", kind.name()));
        }
        versions
    }

    /// Returns the processor time of the endpoints and of the link.
    pub fn cpu(&self) -> Duration {
        let link = self.link.iter().map(|link| link.process);
        let all = self.processes.iter().copied().chain(link);
        all.map(Process::cpu).sum()
    }

    /// Fills the endpoints' addresses into a configuration. `one_of_many` makes a line of each
    /// address of service `many`.
    fn filled(&self, template: &str, one_of_many: impl Fn(IpAddr) -> String) -> String {
        let many: Vec<String> = MANY.map(|host| one_of_many(self.net.ip(host))).collect();
        let fill = |text: String, (_, host, name): (&str, u8, &str)| {
            text.replace(name, &self.net.ip(host).to_string())
        };
        let filled = ENDPOINTS.into_iter().fold(template.to_owned(), fill);
        filled.replace("@MANY@", &many.join("\n"))
    }

    fn mesh(&self) -> String {
        self.filled(include_str!("mesh.yaml"), |ip| {
            format!(
                "  - {{uid: \"{ip}\", namespace: app, network: east, workloadIps: [\"{ip}\"], \
                 protocol: TCP,\n     services: {{app/many.bench: {{80: 9000, 443: 9001}}}}}}"
            )
        })
    }

    /// Returns the configuration, in which Envoy's address and folder are left to fill in.
    fn envoy_yaml(&self) -> String {
        let of_port = |port| {
            move |ip| {
                format!(
                    "        - {{endpoint: {{address: {{socket_address: \
                     {{address: \"{ip}\", port_value: {port}}}}}}}}}"
                )
            }
        };
        let filled = self.filled(include_str!("envoy.yaml"), of_port(9000));
        self.filled(&filled.replace("@MANY_SNI@", "@MANY@"), of_port(9001))
    }

    /// Returns the configuration, in which the folder is left to fill in.
    fn haproxy_cfg(&self, kind: Kind) -> String {
        let [global, defaults] = match kind {
            Kind::HaproxySplice => SPLICE,
            _ => [""; 2],
        };
        let filled =
            self.filled(include_str!("haproxy.cfg"), |ip| format!("    server {ip} {ip}:9001"));
        let host = self.net.ip(last_byte(kind)).to_string();
        filled
            .replace("@HOST@", &host)
            .replace("@GLOBAL@\n", &format!("{global}\n"))
            .replace("@DEFAULTS@\n", &format!("{defaults}\n"))
    }

    /// Returns the configuration, in which the folder is left to fill in.
    fn nginx_conf(&self) -> String {
        let filled =
            self.filled(include_str!("nginx.conf"), |ip| format!("        server {ip}:9001;"));
        let host = self.net.ip(last_byte(Kind::Nginx)).to_string();
        filled.replace("@HOST@", &host)
    }

    /// Returns the settings of a variant of Strait.
    fn strait(&self, kind: Kind) -> Settings<'static> {
        let net = self.net_of(kind);
        let workers = match kind {
            Kind::FourWorkers => 4,
            Kind::TwoWorkers => 2,
            _ => 1,
        };
        let mut settings = Settings::new(net, identities());
        let exposed =
            |name| format!("    - {{service: \"{name}.bench:80\", to: [{{cluster: west}}]}}\n");
        settings.exposure = SERVICES.map(exposed).concat() + &apart_as_echo();
        let route = |name| format!("{{sni: [{name}.bench], to: \"{name}.bench:443\"}}");
        settings.listeners = format!(
            "  - {{name: sni, bind: \"{}\", protocol: tls,\n     routes: [{}]}}\n",
            net.address(last_byte(Kind::Strait), SNI),
            SERVICES.map(route).join(",\n       ")
        );
        settings.mesh = self.mesh();
        settings.more = format!("workers: {workers}\n{STRAIT}");
        settings.descriptors = DESCRIPTORS;
        if let (Kind::Before, Some(program)) = (kind, &self.before) {
            settings.program.clone_from(program);
        }
        settings
    }

    /// Starts Strait twice. The services are in the network of the second gateway. The first one
    /// leads tunnels and the clients of its bindings there.
    async fn two_straits(&self) -> [Gateway; 2] {
        let mesh = self.mesh().replace("network: east", "network: west");
        let settings = |net, to: &str| {
            let mut settings = Settings::new(net, identities());
            let exposed = |name| {
                let entry = |port| format!("    - {{service: \"{name}.bench:{port}\", {to}}}\n");
                [80, 443].map(entry).concat()
            };
            settings.exposure = SERVICES.map(exposed).concat();
            settings.mesh.clone_from(&mesh);
            settings.more = format!("workers: 1\n{STRAIT}");
            settings.descriptors = DESCRIPTORS;
            settings
        };
        let [here, there] = self.hops;
        let mut next = settings(there, "to: [{cluster: east}, {cluster: west}]");
        next.exposure += &apart_as_echo();
        let next_address = |port| there.address(last_byte(Kind::TwoStraits), port);
        for port in APART_PORTS {
            let address = next_address(port);
            next.listeners += &format!("  - {{name: hbone-{port}, bind: \"{address}\"}}\n");
        }
        let mut second = Gateway::spawn(&next, move_to_west);
        second.ready().await;
        let transit = "to: [{cluster: west}], transit: always";
        let mut first = settings(here, transit);
        first.exposure += &format!("    - {{service: \"{APART}:80\", {transit}}}\n");
        first.mesh = mesh_with_apart(&mesh);
        let network = |(name, ports): (&str, RangeInclusive<u16>)| {
            let gateways: Vec<_> =
                ports.map(|port| format!("{:?}", next_address(port).to_string())).collect();
            format!(
                "  - {{name: {name}, cluster: west, identities: [\"{NEXT}\"], gateways: [{}]}}\n",
                gateways.join(", ")
            )
        };
        let networks = [("west", HBONE..=HBONE), ("apart", APART_PORTS)].map(network);
        first.more += &format!("networks:\n{}", networks.concat());
        let binding = |service: usize| {
            format!(
                "  - {{cluster: west, service: \"{}.bench:443\", listen: \"{}\", inner: tcp,\n     \
                 connections: {DESCRIPTORS}, connections_per_client: {DESCRIPTORS}}}\n",
                SERVICES[service],
                self.bare_address(Kind::TwoStraits, here, service)
            )
        };
        let bindings: String = (0..SERVICES.len()).map(binding).collect();
        first.more += &format!("bindings:\n{bindings}");
        [Gateway::start(&first).await, second]
    }

    /// Starts Envoy twice.
    async fn two_envoys(&self) -> [Envoy; 2] {
        let (host, [here, there]) = (last_byte(Kind::TwoEnvoys), self.hops);
        let next = self.envoy_yaml().replace("spiffe://west.local/", "spiffe://east.local/");
        let [own, of_next] = [GATEWAY, NEXT].map(|identity| identities().leaf(identity));
        let second = Envoy::start(&self.envoy, there, host, &of_next, (&next, &[])).await;
        let names = [("NEXT", there.ip(host).to_string())];
        let yaml = (TRANSIT_YAML, &names[..]);
        [Envoy::start(&self.envoy, here, host, &own, yaml).await, second]
    }

    /// Returns the addresses of the endpoints of a service behind bare connections.
    fn endpoints(&self, service: &str) -> Vec<SocketAddr> {
        let of_service = ENDPOINTS.iter().find(|(name, ..)| *name == service);
        let hosts = match of_service {
            Some(&(_, host, _)) => host..=host,
            None => MANY,
        };
        let address = |host| self.net.address(host, AFTER_HELLO);
        hosts.map(address).collect()
    }

    /// Returns the address for bare connections to one of [`SERVICES`]. Gateways route by the
    /// server name; the copy loop and bindings have a port for each service.
    fn bare_address(&self, kind: Kind, net: Net, service: usize) -> SocketAddr {
        let ports = u16::try_from(service).expect("four services");
        match kind {
            Kind::Direct => self.endpoints(SERVICES[service])[0],
            Kind::CopyLoop | Kind::TwoStraits => net.address(last_byte(kind), SNI + ports),
            _ => net.address(last_byte(kind), SNI),
        }
    }

    /// Starts this program as the copy loop in front of all endpoints.
    fn copy_loop(&self) -> Child {
        let forward = |service: usize| Forward {
            listen: self.bare_address(Kind::CopyLoop, self.net, service),
            to: self.endpoints(SERVICES[service]),
        };
        let forwards = (0..SERVICES.len()).map(|service| forward(service).to_string());
        let own = std::env::current_exe().expect("this program");
        let mut command = Command::new(own);
        command.arg("--copy-loop").args(forwards);
        let spawned = command.stdin(Stdio::null()).kill_on_drop(true).spawn();
        spawned.expect("a copy loop")
    }

    /// Starts a fresh gateway. Only one of each kind runs at a time.
    pub async fn gateway(&self, kind: Kind) -> Running {
        let (net, host) = (self.net_of(kind), last_byte(kind));
        let (program, text) = self.program(kind).await;
        let process = Process::child(&text);
        let next = program.next();
        if processors() > 1 && kind != Kind::Direct {
            process.pin(CPU_OF_GATEWAYS);
            next.iter().for_each(|next| next.pin(CPU_OF_GATEWAYS));
        }
        let hbone = net.address(host, HBONE);
        let linked = self.link.as_ref().map(|link| {
            let mut load = Load::new(hbone);
            load.namespace = Some(link.namespace);
            load
        });
        Running {
            kind,
            process,
            next,
            hbone: Load::new(hbone),
            linked,
            bare: [0, 1, 2, 3].map(|service| Load::bare(self.bare_address(kind, net, service))),
            program,
        }
    }

    /// Starts the processes of a gateway. Returns text of the command line of the first one, too.
    async fn program(&self, kind: Kind) -> (Program, String) {
        let (net, host) = (self.net_of(kind), last_byte(kind));
        match kind {
            Kind::Strait | Kind::TwoWorkers | Kind::FourWorkers | Kind::Before => {
                let gateway = Gateway::start(&self.strait(kind)).await;
                let folder = folder_name(&gateway.folder);
                (Program::Strait(gateway), folder)
            }
            Kind::TwoStraits => {
                let gateways = self.two_straits().await;
                let folder = folder_name(&gateways[0].folder);
                (Program::TwoStraits(gateways), folder)
            }
            Kind::Envoy => {
                let yaml = self.envoy_yaml();
                let leaf = identities().leaf(GATEWAY);
                let envoy = Envoy::start(&self.envoy, net, host, &leaf, (&yaml, &[])).await;
                let folder = folder_name(&envoy.folder);
                (Program::Envoy { _process: envoy }, folder)
            }
            Kind::TwoEnvoys => {
                let envoys = self.two_envoys().await;
                let folder = folder_name(&envoys[0].folder);
                (Program::TwoEnvoys(envoys), folder)
            }
            Kind::Haproxy | Kind::HaproxySplice | Kind::Nginx => {
                let program = self.peers.get(&kind).expect("its program");
                let address = net.address(host, SNI);
                let text = self.text(kind);
                let peer = Peer::start(program, &text, address, DESCRIPTORS).await;
                let folder = folder_name(&peer.folder);
                (Program::Peer { _process: peer }, folder)
            }
            Kind::CopyLoop => {
                let process = self.copy_loop();
                let address = self.bare_address(kind, net, 0);
                let listens = async || TcpStream::connect(address).await.is_ok();
                until("the copy loop's listener", listens, |&listens| listens).await;
                (Program::CopyLoop { _process: process }, address.to_string())
            }
            // The endpoint takes the place of the gateway.
            Kind::Direct => {
                (Program::Direct, format!("--bind\0{}", self.bare_address(kind, net, 0)))
            }
        }
    }

    /// Starts Strait with this number of workers on as many processors. Returns its load, too.
    pub async fn with_workers(&self, workers: u32) -> (Gateway, Process, Load) {
        let mut settings = self.strait(Kind::Strait);
        settings.more = format!("workers: {workers}\n{STRAIT}");
        let gateway = Gateway::start(&settings).await;
        let process = Process::child(&folder_name(&gateway.folder));
        process.pin(&format!("0-{}", workers - 1));
        (gateway, process, Load::new(self.net.address(last_byte(Kind::Strait), HBONE)))
    }

    /// Returns the addresses of a gateway, of the first one if there are two.
    fn net_of(&self, kind: Kind) -> Net {
        match kind {
            Kind::TwoWorkers | Kind::Before => self.variants[0],
            Kind::FourWorkers => self.variants[1],
            Kind::TwoStraits | Kind::TwoEnvoys => self.hops[0],
            _ => self.net,
        }
    }

    fn text(&self, kind: Kind) -> String {
        match kind {
            Kind::Strait
            | Kind::TwoStraits
            | Kind::TwoWorkers
            | Kind::FourWorkers
            | Kind::Before => self.mesh(),
            Kind::Envoy => self.envoy_yaml(),
            Kind::TwoEnvoys => TRANSIT_YAML.to_owned(),
            Kind::Haproxy | Kind::HaproxySplice => self.haproxy_cfg(kind),
            Kind::Nginx => self.nginx_conf(),
            Kind::CopyLoop | Kind::Direct => "none".to_owned(),
        }
    }
}

/// Returns the last byte of a gateway's address.
fn last_byte(kind: Kind) -> u8 {
    match kind {
        Kind::Strait | Kind::TwoStraits | Kind::TwoWorkers | Kind::FourWorkers | Kind::Before => 1,
        Kind::Envoy | Kind::TwoEnvoys => 2,
        Kind::Haproxy => 3,
        Kind::HaproxySplice => 4,
        Kind::Nginx => 5,
        Kind::CopyLoop => 6,
        Kind::Direct => 11,
    }
}

/// Makes the files in a folder those of the second of two gateways, in network west.
fn move_to_west(folder: &Path) {
    let leaf = identities().leaf(NEXT);
    let file = folder.join("strait.yaml");
    let text = std::fs::read_to_string(&file).expect("a configuration");
    let text = text
        .replace("{cluster: east, network: east}", "{cluster: west, network: west}")
        .replace("trust:\n", &format!("trust:\n  gateways: [\"{GATEWAY}\"]\n"));
    for (name, text) in
        [("strait.yaml", &text), ("gateway.crt", &leaf.chain_pem), ("gateway.key", &leaf.key_pem)]
    {
        std::fs::write(folder.join(name), text).expect("a file");
    }
}

/// Starts the long link, or prints why it is skipped.
async fn link() -> Option<Link> {
    let link = Link::start().await;
    link.map_err(|why| peers::skip(&format!("80 ms and 1 % loss: {why}"))).ok()
}

impl Program {
    /// Returns the second process of two gateways.
    fn next(&self) -> Option<Process> {
        let folder = match self {
            Self::TwoStraits([_, second]) => &second.folder,
            Self::TwoEnvoys([_, second]) => &second.folder,
            _ => return None,
        };
        Some(Process::child(&folder_name(folder)))
    }
}

impl Running {
    /// Returns the load of a row.
    pub fn load(&self, row: &Row) -> &Load {
        let service = SERVICES.iter().position(|name| *name == row.endpoint);
        match (self.transport(row), &self.linked) {
            (Transport::Sni, _) => &self.bare[service.expect("a service")],
            (Transport::LossyLink, Some(linked)) => linked,
            _ => &self.hbone,
        }
    }

    /// Returns the transport of a row's bytes. The floors have no HBONE.
    pub fn transport(&self, row: &Row) -> Transport {
        if self.kind.is_floor() { Transport::Sni } else { row.way }
    }

    /// Returns the processor time of the gateway, or of both.
    pub fn cpu(&self) -> Duration {
        self.process.cpu() + self.next.map_or(Duration::ZERO, Process::cpu)
    }

    /// Returns the number of sockets that the gateway needs for tunnels: one for each, unless a
    /// second gateway shares connections between them.
    pub fn sockets(&self, held: Held, row: &Row) -> u32 {
        let upstream = match self.next {
            Some(_) if APART.starts_with(row.endpoint) => held.tunnels() * 9 / 10,
            Some(_) => held.tunnels().div_ceil(STREAMS),
            None => held.tunnels(),
        };
        held.connections + upstream
    }

    /// Waits until the process has this many open descriptors.
    pub async fn holds(&self, descriptors: usize) {
        let open = async || self.process.descriptors();
        until("open tunnels", open, |&open| open >= descriptors).await;
    }

    /// Kills the gateway, and waits until its memory and its ports are free.
    pub async fn stop(self) {
        let Self { process, next, program, .. } = self;
        drop(program);
        let lives = async || process.lives() || next.is_some_and(Process::lives);
        until("its end", lives, |&lives| !lives).await;
    }

    /// Returns the configuration with which it was started, without its folder.
    pub fn configuration(&self, world: &BenchEnvironment) -> String {
        match &self.program {
            Program::Strait(gateway) => files(gateway),
            Program::TwoStraits(gateways) => gateways.each_ref().map(files).join("\n"),
            _ => world.text(self.kind),
        }
    }
}

fn folder_name(folder: &TempDir) -> String {
    folder.path().display().to_string()
}

/// Returns the files of a gateway, each under its name.
fn files(gateway: &Gateway) -> String {
    let read = |name| std::fs::read_to_string(gateway.file(name)).expect("a file");
    format!("# strait.yaml\n{}\n# mesh.yaml\n{}", read("strait.yaml"), read("mesh.yaml"))
}
