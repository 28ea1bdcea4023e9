//! Service whose network has many gateways, so that each of its tunnels opens a pooled connection.

use std::ops::RangeInclusive;

/// Service whose network has a gateway at each of these ports, which are listeners of the second of
/// two gateways. Elsewhere it is a name of service `echo`.
pub const APART: &str = "apart.bench";
pub const APART_PORTS: RangeInclusive<u16> = 16_001..=16_512;

/// Returns the entry that exposes service `echo` by the name of [`APART`].
pub fn apart_as_echo() -> String {
    let to = "to: [{cluster: east}, {cluster: west}]";
    format!("    - {{service: \"echo.bench:80\", {to}, names: [\"{APART}:80\"]}}\n")
}

/// Returns a mesh with service [`APART`] in a network of its own. Its workload is never dialled. An
/// unhealthy one keeps bindings to `echo` off that network, where its instances would be unknown.
pub fn mesh_with_apart(mesh: &str) -> String {
    let (services, workloads) = mesh.split_once("workloads:\n").expect("a list of workloads");
    format!(
        "{services}  - name: apart
    namespace: app
    hostname: {APART}
    vips: []
    ports: {{80: 9000}}
workloads:
  - uid: apart
    namespace: app
    network: apart
    workloadIps: [\"192.0.2.1\"]
    protocol: TCP
    services: {{app/{APART}: {{80: 9000}}}}
  - uid: unhealthy
    namespace: app
    network: apart
    workloadIps: [\"192.0.2.2\"]
    protocol: TCP
    status: Unhealthy
    services: {{app/echo.bench: {{443: 9001}}}}
{workloads}"
    )
}
