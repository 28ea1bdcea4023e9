//! Test of the dump with the types that `istioctl ztunnel-config` unmarshals. Go rejects values of
//! another type than its struct fields, and ignores missing keys (docs/wire-contract.md 6.3).
#![expect(dead_code, reason = "that a field can be read with its type is what is tested")]

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};

use super::{Fixture, SERIAL, admin_router, ask, certificate, fixture, mesh};
use crate::snapshot::authorization::{Condition, Match, Policy as Rules, PolicyScope};
use crate::snapshot::builder::Change;
use crate::snapshot::mesh::{self, GatewayAddress, Place, Waypoint};

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Dump {
    workloads: Vec<Workload>,
    services: Vec<Service>,
    policies: Vec<Policy>,
    certificates: Vec<Certificate>,
    workload_state: BTreeMap<String, WorkloadState>,
    version: BTreeMap<String, Value>,
    config: BTreeMap<String, Value>,
    static_config: BTreeMap<String, Vec<Value>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Workload {
    uid: String,
    workload_ips: Vec<String>,
    waypoint: Option<Gateway>,
    network_gateway: Option<Gateway>,
    protocol: String,
    name: String,
    namespace: String,
    service_account: String,
    workload_name: String,
    workload_type: String,
    canonical_name: String,
    canonical_revision: String,
    cluster_id: String,
    trust_domain: String,
    locality: BTreeMap<String, String>,
    node: String,
    network: String,
    status: String,
    capacity: u32,
    services: Vec<String>,
    authorization_policies: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Gateway {
    destination: String,
    hbone_mtls_port: u32,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Service {
    name: String,
    namespace: String,
    hostname: String,
    vips: Vec<String>,
    ports: BTreeMap<String, u32>,
    endpoints: BTreeMap<String, Endpoint>,
    subject_alt_names: Vec<String>,
    waypoint: Option<Gateway>,
    load_balancer: Option<LoadBalancer>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Endpoint {
    workload_uid: String,
    service: String,
    port: BTreeMap<String, u16>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct LoadBalancer {
    routing_preferences: Vec<String>,
    mode: String,
    health_policy: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Policy {
    name: String,
    namespace: String,
    scope: String,
    action: String,
    rules: Vec<Vec<Vec<BTreeMap<String, Value>>>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Certificate {
    identity: String,
    state: String,
    cert_chain: Vec<Cert>,
    root_certs: Vec<Cert>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Cert {
    pem: String,
    #[serde(deserialize_with = "decimal")]
    serial_number: String,
    valid_from: String,
    expiration_time: String,
}

#[derive(Debug, Deserialize)]
struct WorkloadState {}

/// Accepts the same strings as `big.Int.SetString(_, 10)`.
fn decimal<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let text = String::deserialize(from)?;
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        Ok(text)
    } else {
        Err(D::Error::custom(format!("not a decimal number: {text}")))
    }
}

fn policy() -> Rules {
    let mut policy =
        Rules::deny_all_unreadable("app".into(), "p".into(), PolicyScope::Namespace, false);
    let ports = Condition { any: vec![80], none: Vec::new() };
    let one = Match { destination_ports: ports, ..Match::default() };
    policy.rules[0] = vec![vec![one]];
    policy
}

#[tokio::test]
async fn istioctl_reads_the_dump() {
    let Fixture { state, publisher, _log } = fixture();
    let mut mesh = mesh();
    let gateway = GatewayAddress {
        place: Place::Address("west".into(), "10.9.0.1".parse().expect("an address")),
        port: 15008,
    };
    let remote = mesh::Workload {
        uid: "west".into(),
        network_gateway: Some(Arc::new(gateway.clone())),
        template: Arc::new(mesh::Template {
            policies: ["app/p".into()].into(),
            ..mesh::Template::default()
        }),
        ..mesh::Workload::default()
    };
    mesh.workloads.insert("west".into(), Arc::new(remote));
    let waypoint = Waypoint { gateway, weight: 1 };
    let behind = mesh::Service {
        hostname: "behind.app".into(),
        waypoints: vec![waypoint],
        preferences: Some(vec![mesh::Scope::Network, mesh::Scope::Zone]),
        ..mesh::Service::default()
    };
    mesh.services.insert("app/z".into(), Arc::new(behind));
    publisher.update(Change {
        mesh: Some((mesh, "east".into())),
        policies: Some([Arc::new(policy())].into_iter().collect()),
        ..Change::default()
    });
    state.status.set_certificate(certificate());
    let (_, body) = ask(admin_router(state), "GET", "/config_dump").await;
    let dump: Dump = serde_json::from_str(&body).expect("the shape that istioctl reads");
    let [echo, west] = &dump.workloads[..] else {
        panic!("{dump:?}");
    };
    assert_eq!((&*echo.name, &*echo.protocol, &*echo.status), ("echo-1", "HBONE", "Healthy"));
    assert_eq!(echo.services, ["app/echo.app"]);
    let through = west.network_gateway.as_ref().expect("a gateway");
    assert_eq!((&*through.destination, through.hbone_mtls_port), ("west/10.9.0.1", 15008));
    let behind = &dump.services[1];
    assert!(behind.waypoint.is_some() && dump.services[0].waypoint.is_none());
    let balancer = behind.load_balancer.as_ref().expect("a load balancer");
    assert_eq!(
        (&*balancer.mode, &balancer.routing_preferences[..]),
        ("Failover", &["Network".to_owned(), "Zone".to_owned()][..])
    );
    assert_eq!(dump.policies[0].scope, "Namespace");
    assert_eq!(dump.policies[0].rules[0][0][0]["destinationPorts"], json!([80]));
    assert_eq!(dump.certificates[0].cert_chain[0].serial_number, SERIAL);
    assert!(dump.workload_state.is_empty());
}
