//! Tests of whole mesh files: the resulting mesh, or the findings.

use std::path::PathBuf;

use proptest::prelude::*;

use super::*;
use crate::config::{Discovery, Source};
use crate::snapshot::authorization::{self, StringMatch};
use crate::snapshot::mesh::{GatewayAddress, Place, Scope, Waypoint};

fn read(text: &str) -> Result<Mesh, String> {
    let parsed = parse(Path::new("m.yaml"), text);
    let parsed = parsed.map_err(|findings| findings.to_string());
    parsed.map(|(mesh, _)| mesh)
}

/// Returns the findings about a mesh, without the file name.
fn refusal(text: &str) -> String {
    read(text).unwrap_err().replace("m.yaml:", "")
}

/// Returns a file with service `a/b.c` and port 80 on line 1, followed by `rest`.
fn with_service(rest: &str) -> String {
    format!(
        "services: [{{name: b, namespace: a, hostname: b.c, vips: [], ports: {{80: 0}}}}]\n{rest}"
    )
}

fn workload_with(keys: &str) -> String {
    with_service(&format!(
        "workloads:\n- {{uid: u, workloadIps: [10.0.0.1], namespace: a, services: {{}}, {keys}}}\n"
    ))
}

#[test]
fn what_is_left_out_has_the_default_of_the_contract() {
    let mesh = read(&workload_with("")).unwrap();
    let workload = &mesh.workloads.sorted()[0];
    let want = Workload {
        uid: "u".into(),
        own_name: Some("".into()),
        addresses: [IpAddr::from([10, 0, 0, 1])].into(),
        healthy: true,
        capacity: 1,
        template: Template {
            namespace: "a".into(),
            service_account: "default".into(),
            trust_domain: "cluster.local".into(),
            cluster: "Kubernetes".into(),
            ..Template::default()
        }
        .into(),
        ..Workload::default()
    };
    assert_eq!(***workload, want);
    assert_eq!(mesh.services.sorted()[0].ports, BTreeMap::from([(80, 0)]));
}

const EVERY_KEY: &str = r#"
workloads:
- uid: cluster1//Pod/a/w
  name: w
  workloadIps: ["::ffff:10.0.0.1", "2001:db8::1"]
  services: {a/B.C.: {80: 8080, "81": 8081}}
  namespace: a
  serviceAccount: ""
  trustDomain: td
  clusterId: c
  network: n
  node: node
  hostname: h
  protocol: HBONE
  networkMode: HostNetwork
  status: Unhealthy
  capacity: 0
  locality: {region: r, zone: z, subzone: s}
  waypoint: {destination: n/10.0.0.9, hboneMtlsPort: 15008}
  networkGateway: {destination: a/gw.c}
  workloadName: wn
  workloadType: deployment
  canonicalName: cn
  canonicalRevision: 1.10
  nativeTunnel: false
  applicationTunnel: {protocol: PROXY, port: 1}
  authorizationPolicies: [a/p]
  labels: {team: x, example.com/tier: 2, empty: ""}
services:
- name: b
  namespace: a
  hostname: B.C.
  vips: [n/10.1.0.1, "/2001:db8::2"]
  ports: {80: 8080, 81: 0}
  cidrVips: [n/10.2.0.0/16]
  endpoints: {anything: [1]}
  subjectAltNames: ["spiffe://td/ns/a/sa/b"]
  waypoint: {destination: a/w.c, hboneMtlsPort: 15008}
  weightedWaypoints: [{destination: {destination: a/w.c}, weight: 3}]
  loadBalancer: {routingPreferences: [Network, Region], mode: Passthrough, healthPolicy: AllowAll}
  ipFamilies: Dual
  visibility: Namespace
  canonical: true
policies:
- name: p
  namespace: a
  scope: Namespace
  action: Deny
  rules: [[[{notPrincipals: [{Presence: []}], destinationPorts: [80], sourceIps: [10.0.0.0/8],
    serviceAccounts: [{namespace: a, serviceAccount: b}]}], [{namespaces: [{Exact: x}]}]]]
  dryRun: true
"#;

#[test]
fn every_key_of_the_shape_is_read() {
    let mesh = read(EVERY_KEY).unwrap();
    let [record, workload] = mesh.workloads.sorted()[..] else {
        panic!("{mesh:?}");
    };
    // The gateway that the workload names has a record, and its hostname is resolved.
    assert_eq!(&*record.uid, "NetworkGateway/n/gw.c/15008");
    assert_eq!((&*record.network, &*record.hostname), ("n", "gw.c"));
    let service = &mesh.services.sorted()[0];
    assert_eq!(workload.addresses[0].to_string(), "10.0.0.1");
    let ports = [(80, 8080), (81, 8081)].into();
    assert_eq!(workload.services, [("a/b.c".into(), ports)].into());
    assert_eq!((&*workload.service_account, workload.capacity), ("default", 0));
    assert_eq!(workload.protocol, Protocol::Hbone);
    assert_eq!(&*workload.canonical_revision, "1.10");
    assert!(workload.host_network && workload.has_waypoint && !workload.healthy);
    let gateway = |name: &str| GatewayAddress { place: Place::Name(name.to_owned()), port: 15008 };
    assert_eq!(workload.network_gateway.as_deref(), Some(&gateway("a/gw.c")));
    assert_eq!(*workload.policies, ["a/p".into()]);
    let labels =
        ["example.com/tier", "empty", "team"].map(|key| &**workload.pod_labels.get(key).unwrap());
    assert_eq!(labels, ["2", "", "x"]);
    assert_eq!(&*workload.locality.subzone, "s");
    assert_eq!(&*service.hostname, "b.c");
    assert_eq!(service.vips[1], (String::new(), "2001:db8::2".parse().unwrap()));
    let waypoint = Waypoint { gateway: gateway("a/w.c"), weight: 3 };
    assert_eq!(service.waypoints, [waypoint]);
    assert!(service.allow_unhealthy && service.passthrough && !service.strict);
    assert_eq!(service.preferences, None, "this mode has none");
    let failover = read(&EVERY_KEY.replace("mode: Passthrough", "mode: Failover")).unwrap();
    let preferences = &failover.services.sorted()[0].preferences;
    assert_eq!(*preferences, Some(vec![Scope::Network, Scope::Region]));
    assert!(service.canonical && service.private);
}

#[test]
fn policies_of_the_file_are_those_of_the_control_plane() {
    let (_, policies) = parse(Path::new("m.yaml"), EVERY_KEY).unwrap();
    let policy = policies.iter().next().unwrap();
    assert_eq!((policies.len(), policy.full_name().as_str()), (1, "a/p"));
    assert_eq!(policy.scope, authorization::PolicyScope::Namespace);
    assert_eq!(policy.action, authorization::Action::Deny);
    assert!(policy.dry_run && !policy.unreadable);
    let [rule] = &*policy.rules else {
        panic!("{policy:?}");
    };
    let [first, second] = &*rule.clauses else {
        panic!("{policy:?}");
    };
    let one = &first.matches[0];
    assert_eq!(one.principals.none, [StringMatch::Presence]);
    assert_eq!(one.destination_ports.any, [80]);
    assert_eq!(one.source_ips.any[0].to_string(), "10.0.0.0/8");
    assert_eq!(one.service_accounts.any, [("a".to_owned(), "b".to_owned())]);
    let exact = StringMatch::Exact("x".to_owned());
    assert_eq!(second.matches[0].namespaces.any, [exact]);
}

#[test]
fn a_workload_may_have_a_name_in_place_of_addresses() {
    let named = |host: &str| {
        let entry = format!("{{uid: u, workloadIps: [], namespace: a, services: {{}}, {host}}}");
        read(&format!("workloads:\n- {entry}\n"))
    };
    for (host, want) in
        [("hostname: DB.Example.", "db.example"), ("hostname: ''", ""), ("name: w", "")]
    {
        let mesh = named(host).unwrap();
        assert_eq!(&*mesh.workloads.sorted()[0].hostname, want, "{host}");
    }
    let entry = "{uid: u, workloadIps: [], namespace: a, services: {}, hostname: 'a b'}";
    let refused = refusal(&format!("workloads:\n- {entry}\n"));
    assert!(refused.contains("`workloads[].hostname` is `a b`; write a host name"), "{refused}");
}

#[test]
fn of_two_services_with_one_hostname_the_canonical_one_wins() {
    let entry = |namespace: &str, port: u16, canonical: bool| {
        format!(
            "- {{name: b, namespace: {namespace}, hostname: b.c, vips: [], ports: {{{port}: 0}}, \
             canonical: {canonical}}}\n"
        )
    };
    let both = |a: String, b: String| format!("services:\n{a}{b}");
    let mesh = read(&both(entry("a", 80, false), entry("a", 81, true))).unwrap();
    assert_eq!(mesh.services.len(), 1);
    assert!(mesh.services.sorted()[0].ports.contains_key(&81));
    let mesh = read(&both(entry("a", 80, true), entry("other", 80, false))).unwrap();
    assert_eq!(mesh.services.len(), 2);
    for canonical in [false, true] {
        assert_eq!(
            refusal(&both(entry("a", 80, canonical), entry("a", 80, canonical))),
            "3: error: `services[]` has the hostname `b.c`, which line 2 has too; write \
             `canonical: true` at exactly one of them, or another hostname"
        );
    }
}

const MESH: &str = r#"services:
  - {name: echo, namespace: app, hostname: echo.app, vips: [], ports: {80: 8080}}
workloads:
  - uid: one
    workloadIps: [10.0.0.1]
    namespace: app
    protocol: HTTP
    services: {app/echo.app: {81: 8080}}
  - uid: two
    workloadIps: [10.0.0.2]
    namespace: app
    capacitty: 3
    services:
      app/ehco.app: {80: 8080}
"#;

#[test]
fn the_examples_for_a_laptop_load() {
    let local = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("deploy/local");
    // A command generates the certificates, and they are not committed. The test uses a copy of
    // the examples with empty certificate files.
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("deploy/local");
    std::fs::create_dir_all(&copy).unwrap();
    std::fs::create_dir(folder.path().join("certs")).unwrap();
    for name in ["gateway.crt", "gateway.key", "root.crt"] {
        std::fs::write(folder.path().join("certs").join(name), "").unwrap();
    }
    for name in ["strait.yaml", "mesh.yaml"] {
        std::fs::copy(local.join(name), copy.join(name)).unwrap();
    }
    let examined = Source::file(&copy.join("strait.yaml")).examine();
    assert_eq!(examined.findings.to_string(), "");
    let config = examined.config.unwrap();
    let Discovery::File { path } = config.discovery else {
        panic!("a mesh file, and not {:?}", config.discovery);
    };
    let ((mesh, _), _) = load(&path).unwrap();
    assert_eq!(mesh.workloads.sorted().iter().map(|w| w.capacity).collect::<Vec<_>>(), [1, 3]);
    assert_eq!(*mesh.services.sorted()[0].hostname, config.exposure.services[0].service.host);
}

/// The parser stops at 250,000 keys and values unless its limits are raised. This file has 1.5
/// times as many. The 100,000 workloads that we promise would take a minute without
/// optimisation.
#[test]
fn a_mesh_beyond_the_limits_of_the_parser_is_read() {
    const COUNT: u32 = 8_000;
    let mut text = with_service("workloads:\n");
    for i in 0..COUNT {
        let ip = std::net::Ipv4Addr::from_bits(0x0a00_0001 + i);
        text.push_str(&format!(
            "- uid: east//Pod/a/pod-{i}\n  name: pod-{i}\n  namespace: a\n  workloadIps: [{ip}]\n  \
             protocol: HBONE\n  serviceAccount: default\n  trustDomain: east.local\n  \
             clusterId: east\n  network: east\n  node: node-{}\n  capacity: 3\n  \
             locality: {{region: r, zone: z}}\n  status: Healthy\n  workloadName: pod\n  \
             workloadType: deployment\n  \
             canonicalName: pod\n  canonicalRevision: latest\n  \
             services: {{a/b.c: {{80: 8080}}}}\n",
            i % 100
        ));
    }
    assert_eq!(read(&text).unwrap().workloads.len(), COUNT as usize);
}

proptest! {
    #[test]
    fn no_text_panics_the_loader(
        lines in proptest::collection::vec(
            "( {0,4}(- )?(workloads|services|policies|uid|ports|rules|vips|workloadIps): ?)?\
             ([{}\\[\\],:\"'a0*/ -]|\\PC){0,12}", 0..12)
    ) {
        let _ = parse(Path::new("m.yaml"), &lines.join("\n"));
    }

    #[test]
    fn no_damage_to_a_good_file_panics_the_loader(at in 0..MESH.len(), put in "\\PC{0,3}") {
        if MESH.is_char_boundary(at) {
            let _ = parse(Path::new("m.yaml"), &format!("{}{put}{}", &MESH[..at], &MESH[at..]));
            let _ = parse(Path::new("m.yaml"), &MESH[..at]);
        }
    }
}
