//! A mesh file that no case of `tests/corpus/findings/mesh` is as large as.

use super::*;

/// The parser stops at 250,000 keys and values unless its limits are raised. This file has 1.5
/// times as many. The 100,000 workloads that we promise would take a minute without
/// optimisation.
#[test]
fn a_mesh_beyond_the_limits_of_the_parser_is_read() {
    const COUNT: u32 = 8_000;
    let service = "{name: b, namespace: a, hostname: b.c, vips: [], ports: {80: 0}}";
    let mut text = format!("services: [{service}]\nworkloads:\n");
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
    let (mesh, _) = parse(Path::new("m.yaml"), &text).unwrap();
    assert_eq!(mesh.workloads.len(), COUNT as usize);
}
