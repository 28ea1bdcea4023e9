//! Random mesh, in which every kind of rejection can occur, and its gateway.

use std::fmt::Write as _;

use fastrand::Rng;

use crate::support::{Endpoint, Gateway, Net, Settings, identities};

pub const SERVICES: usize = 24;
pub const ISTIO: u16 = 15443;
pub const ROUTES: u16 = 15012;
pub const NARROW: u16 = 15017;
pub const BY_NAME: u16 = 15009;

/// Workloads, by host: protocol, defect, and own policy.
const WORKLOADS: [(u8, &str, &str); 8] = [
    (11, "TCP", ""),
    (12, "HBONE", ""),
    (13, "TCP", "status: Unhealthy, "),
    (14, "TCP", "capacity: 0, "),
    (15, "TCP", "authorizationPolicies: [app/no-bank], "),
    (16, "HBONE", "authorizationPolicies: [app/no-bank], "),
    (17, "HBONE", "authorizationPolicies: [app/no-shop], "),
    // Its address is one that is never dialled.
    (18, "TCP", ""),
];
const NEVER_DIALLED: &str = "169.254.7.7";
const WAYPOINT_HOST: u8 = 20;
pub const WAYPOINT: &str = "spiffe://east.local/ns/edge/sa/waypoint";

pub const AUDIENCES: [&str; 6] = [
    "{cluster: west}",
    "{cluster: west, namespaces: [shop]}",
    "{cluster: east}",
    "{anyone: true}",
    "{cluster: south}",
    "{service_accounts: [bank/teller]}",
];

/// Running gateway of such a mesh, with its endpoints.
pub struct World {
    pub gateway: Gateway,
    pub net: Net,
    /// Authorities that peers may request.
    pub authorities: Vec<String>,
    _endpoints: Vec<Endpoint>,
}

impl World {
    pub async fn start(rng: &mut Rng) -> Self {
        let net = Net::new();
        let mut endpoints = Vec::new();
        for (host, port) in [
            (11, 9000),
            (12, 9000),
            (12, 15008),
            (15, 9000),
            (16, 9000),
            (16, 15008),
            (17, 9000),
            (17, 15008),
            (WAYPOINT_HOST, 15008),
        ] {
            endpoints.push(Endpoint::echo(net.listen(host, port).await));
        }
        let mut settings = Settings::new(net, identities());
        settings.mesh = mesh(rng, net);
        settings.exposure = exposure(rng);
        settings.listeners = listeners(net);
        settings.more += MORE;
        let mut gateway = Gateway::spawn(&settings, |folder| {
            let file = folder.join("strait.yaml");
            let text = std::fs::read_to_string(&file).expect("a configuration");
            let west = "    - {name: west.local, cluster: west}\n";
            assert!(text.contains(west));
            let south = west.replace("west", "south");
            std::fs::write(&file, text.replace(west, &format!("{west}{south}")))
                .expect("a configuration");
        });
        gateway.ready().await;
        Self { gateway, net, authorities: authorities(net), _endpoints: endpoints }
    }
}

const MORE: &str = "links: [{from: west, to: east}]
policy: {istio: enforce}
names:
  aliases:
    - {name: \"west.only:80\", to: s0.app.global, consumers: [west]}
    - {name: \"both.alias\", to: [s1.app.global, s2.app.global]}
    - {name: \"more.alias:80\", to: [s3.app.global, s4.app.global, s5.app.global]}
    - {name: \"far.alias:80\", to: s6.app.global, region: far}
    - {name: \"near.alias:80\", to: [s7.app.global, s8.app.global], region: near}
";

fn hostname(at: usize) -> String {
    format!("s{at}.app.svc.cluster.local")
}

fn authorities(net: Net) -> Vec<String> {
    let mut all = Vec::new();
    for at in 0..SERVICES {
        let host = hostname(at);
        all.push(format!("{host}:80"));
        all.push(match at % 6 {
            0 => format!("{host}:81"),
            1 => format!("s{at}.app.global:80"),
            2 => format!("s{at}.example:80"),
            3 => format!("s{at}.example:8080"),
            4 => format!("240.0.1.{at}:80"),
            _ => format!("S{at}.app.SVC.cluster.local.:80"),
        });
    }
    for (host, ..) in WORKLOADS {
        all.push(format!("{}:9000", net.ip(host)));
    }
    let others = [
        "west.only:80",
        "both.alias:80",
        "more.alias:80",
        "more.alias:81",
        "far.alias:80",
        "near.alias:80",
        "nobody.app.svc.cluster.local:80",
        "s1.app.svc.cluster.local:080",
        "waypoint.edge.svc.cluster.local:15008",
    ];
    all.extend(others.map(ToOwned::to_owned));
    all
}

fn one_in(rng: &mut Rng, of: u8) -> bool {
    rng.u8(..of) == 0
}

fn mesh(rng: &mut Rng, net: Net) -> String {
    let mut text = "services:\n".to_owned();
    for at in 0..SERVICES {
        let waypoint = match rng.u8(..10) {
            0 => "waypoint: {destination: edge/waypoint.edge.svc.cluster.local}, ",
            1 => "waypoint: {destination: edge/gone.edge.svc.cluster.local}, ",
            _ => "",
        };
        let _ = writeln!(
            text,
            "  - {{name: s{at}, namespace: app, hostname: {}, {waypoint}vips: [east/240.0.1.{at}],
     ports: {{80: 9000}}}}",
            hostname(at)
        );
    }
    // A waypoint that a service names has to be in the mesh, if it is to be found.
    for name in ["waypoint", "gone"] {
        let _ = writeln!(
            text,
            "  - {{name: {name}, namespace: edge, hostname: {name}.edge.svc.cluster.local, vips: [],
     ports: {{15008: 15008}}}}"
        );
    }
    text += "workloads:\n";
    let served: Vec<Vec<usize>> = (0..SERVICES).map(|_| endpoints(rng)).collect();
    for (place, (host, protocol, more)) in WORKLOADS.into_iter().enumerate() {
        let ip = match host {
            18 => NEVER_DIALLED.to_owned(),
            host => net.ip(host).to_string(),
        };
        let region = if one_in(rng, 2) { "near" } else { "other" };
        let services = (0..SERVICES).filter(|at| served[*at].contains(&place));
        let services = services.map(|at| format!("app/{}: {{80: 9000}}", hostname(at)));
        let _ = writeln!(
            text,
            "  - {{uid: \"east/{host}\", name: \"pod-{host}\", namespace: app, {more}
     serviceAccount: echo, trustDomain: east.local, clusterId: east, network: east,
     workloadIps: [\"{ip}\"], protocol: {protocol}, locality: {{region: {region}}},
     services: {{{}}}}}",
            services.collect::<Vec<_>>().join(", ")
        );
    }
    let _ = writeln!(
        text,
        "  - {{uid: \"east/waypoint\", name: waypoint, namespace: edge, serviceAccount: waypoint,
     trustDomain: east.local, clusterId: east, network: east, protocol: HBONE,
     workloadIps: [\"{}\"], services: {{edge/waypoint.edge.svc.cluster.local: {{15008: 15008}}}}}}",
        net.ip(WAYPOINT_HOST)
    );
    text += "policies:\n";
    for of in ["bank", "shop"] {
        let _ = writeln!(
            text,
            "  - {{name: no-{of}, namespace: app, scope: WorkloadSelector, action: Deny,
     rules: [[[{{namespaces: [{{Exact: {of}}}]}}]]]}}"
        );
    }
    text
}

/// Returns the indices of a service's workloads: usually one that serves, often others, or none.
fn endpoints(rng: &mut Rng) -> Vec<usize> {
    match rng.u8(..8) {
        0 => Vec::new(),
        1 => vec![2, 3],
        2 => vec![7],
        3 => vec![4, 5, 6],
        4 => vec![4],
        5 => vec![0, 4, 5, 7],
        _ => vec![rng.usize(..2), 2],
    }
}

fn exposure(rng: &mut Rng) -> String {
    let mut text = String::new();
    for at in 0..SERVICES {
        if one_in(rng, 5) {
            continue;
        }
        let to: Vec<_> =
            (0..rng.u8(1..3)).map(|_| *rng.choice(&AUDIENCES).expect("an audience")).collect();
        let route_by = match rng.u8(..6) {
            0 => "route_by: sni, ",
            1 => "route_by: strict, ",
            _ => "",
        };
        let workloads = one_in(rng, 3);
        let host = if one_in(rng, 4) { format!("s{at}.app.global") } else { hostname(at) };
        let _ = writeln!(
            text,
            "    - {{service: \"{host}:80\", to: [{}], {route_by}workloads: {workloads},
       names: [\"s{at}.example:80\"]}}",
            to.join(", ")
        );
    }
    text
}

fn listeners(net: Net) -> String {
    let ip = net.ip(1);
    format!(
        "  - {{name: by-name, bind: \"{ip}:{BY_NAME}\", protocol: hbone, route_by: sni}}
  - {{name: sidecars, bind: \"{ip}:{ISTIO}\", protocol: tls, routing: istio}}
  - name: routes
    bind: \"{ip}:{ROUTES}\"
    protocol: tls
    routes:
      - {{sni: [\"*.example\"], to: \"s9.app.svc.cluster.local:80\"}}
      - {{sni: [\"a.example\", \"b.example\"], to: \"s10.app.svc.cluster.local:80\"}}
      - {{sni: [\"c.example\"], to: \"s11.app.svc.cluster.local:80\"}}
      - {{sni: [\"d.example\"], to: \"s12.app.svc.cluster.local:80\"}}
      - {{sni: [\"gone.other\"], to: \"gone.app.svc.cluster.local:80\"}}
  - {{name: narrow, bind: \"{ip}:{NARROW}\", protocol: tls, routing: istio,
     sources: [192.0.2.0/24]}}
"
    )
}
