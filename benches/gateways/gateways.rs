//! The two gateways and the endpoints behind them, each a process.

use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::command::{Load, Serve};
use crate::common::machine::{CPU_OF_GATEWAYS, processors};
use crate::common::process::Process;
use crate::envoy::Envoy;
use crate::support::{GATEWAY, Gateway, Net, Settings, endpoint_port, identities, until};

/// Names of services.
const SERVICES: [&str; 4] = ["echo", "many", "sink", "source"];
/// Services of one endpoint, each with the mode of `strait load serve`, which is its name too, the
/// last byte of its address, and what stands for that in configurations.
const ENDPOINTS: [(&str, u8, &str); 3] = [
    ("echo", 11, "@ECHO@"),
    ("sink", 12, "@SINK@"),
    ("source", 13, "@SOURCE@"),
];
/// The last bytes of the addresses of service `many`, which are echoes too. Each tunnel that ends
/// keeps a port to its endpoint for a minute, and the kernel has 14,000 for one address that it
/// finds at once: a round of churn needs more, and would measure the search for them.
const MANY: RangeInclusive<u8> = 21..=28;
/// More than all idle tunnels need.
const DESCRIPTORS: u32 = 16_384;
/// Strait's part beside what every gateway of the tests has: no access log, as Envoy has none.
const STRAIT: &str = "workers: 1\nlog: {level: warn}\n";
/// The last byte of Envoy's address; that of Strait's is 1.
const ENVOY: u8 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Strait,
    Envoy,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Strait => "Strait",
            Self::Envoy => "Envoy",
        }
    }
}

/// The endpoints, and what is needed to start gateways before them.
pub struct World {
    net: Net,
    envoy: PathBuf,
    _endpoints: Vec<Serve>,
    processes: Vec<Process>,
}

/// A gateway that runs. It is killed when it is dropped.
pub struct Running {
    pub process: Process,
    pub load: Load,
    program: Program,
}

enum Program {
    Strait(Gateway),
    Envoy(Envoy),
}

impl World {
    pub async fn start(envoy: &Path) -> Self {
        let net = Net::new();
        let (mut endpoints, mut processes) = (Vec::new(), Vec::new());
        let many = MANY.map(|host| ("echo", host));
        for (mode, host) in ENDPOINTS
            .map(|(mode, host, _)| (mode, host))
            .into_iter()
            .chain(many)
        {
            let address = net.address(host, endpoint_port());
            endpoints.push(Serve::plain(address, mode).await);
            processes.push(Process::child(&address.to_string()));
        }
        Self {
            net,
            envoy: envoy.to_owned(),
            _endpoints: endpoints,
            processes,
        }
    }

    /// The endpoints' processor time.
    pub fn cpu(&self) -> Duration {
        self.processes.iter().map(|process| process.cpu()).sum()
    }

    /// A configuration with the addresses of the endpoints; `one_of_many` makes a line of each
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
                 protocol: TCP,\n     services: {{app/many.bench: {{80: 9000}}}}}}"
            )
        })
    }

    /// What is left open is Envoy's own address and folder.
    fn envoy_yaml(&self) -> String {
        self.filled(include_str!("envoy.yaml"), |ip| {
            format!(
                "        - {{endpoint: {{address: {{socket_address: \
                 {{address: \"{ip}\", port_value: 9000}}}}}}}}"
            )
        })
    }

    fn strait(&self) -> Settings<'static> {
        let mut settings = Settings::new(self.net, identities());
        let exposed =
            |name| format!("    - {{service: \"{name}.bench:80\", to: [{{cluster: west}}]}}\n");
        settings.exposure = SERVICES.map(exposed).concat();
        settings.mesh = self.mesh();
        settings.more = STRAIT.to_owned();
        settings.descriptors = DESCRIPTORS;
        settings
    }

    /// Starts a fresh gateway. There is one of each kind at a time.
    pub async fn gateway(&self, kind: Kind) -> Running {
        let (program, host, text) = match kind {
            Kind::Strait => {
                let gateway = Gateway::start(&self.strait()).await;
                let folder = gateway.folder.path().display().to_string();
                (Program::Strait(gateway), 1, folder)
            }
            Kind::Envoy => {
                let yaml = self.envoy_yaml();
                let leaf = identities().leaf(GATEWAY);
                let envoy = Envoy::start(&self.envoy, self.net, ENVOY, &leaf, (&yaml, &[])).await;
                // Envoy is the only child with such an argument.
                (
                    Program::Envoy(envoy),
                    ENVOY,
                    "--disable-hot-restart".to_owned(),
                )
            }
        };
        let process = Process::child(&text);
        if processors() > 1 {
            process.pin(CPU_OF_GATEWAYS);
        }
        Running {
            process,
            load: Load::new(self.net.address(host, 15008)),
            program,
        }
    }
}

impl Running {
    /// Waits until it has so many tunnels open.
    pub async fn holds(&self, tunnels: u32) {
        let open = async || match &self.program {
            Program::Strait(gateway) => gateway.metric("strait_tunnels_open").await,
            Program::Envoy(envoy) => {
                let active = envoy.stat("http.hbone.downstream_rq_active").await;
                active as f64
            }
        };
        let wanted = f64::from(tunnels);
        until("open tunnels", open, |&open| open >= wanted).await;
    }

    /// Kills it, and waits until its memory and its ports are free.
    pub async fn stop(self) {
        let Self {
            process, program, ..
        } = self;
        drop(program);
        until("its end", async || process.lives(), |&lives| !lives).await;
    }
    /// The configuration that it was started with, without the folder of its own.
    pub fn configuration(&self, world: &World) -> String {
        match &self.program {
            Program::Strait(gateway) => {
                let read = |name| std::fs::read_to_string(gateway.file(name)).expect("a file");
                format!(
                    "# strait.yaml\n{}\n# mesh.yaml\n{}",
                    read("strait.yaml"),
                    read("mesh.yaml")
                )
            }
            Program::Envoy(_) => world.envoy_yaml(),
        }
    }
}
