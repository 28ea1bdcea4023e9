//! Tests of whole mesh files: the resulting mesh, or the findings.

use std::path::PathBuf;

use proptest::prelude::*;

use super::*;
use crate::config::{Discovery, Source};

fn read(text: &str) -> Result<Mesh, String> {
    let parsed = parse(Path::new("m.yaml"), text);
    let parsed = parsed.map_err(|findings| findings.to_string());
    parsed.map(|(mesh, _)| mesh)
}

/// Returns a file with service `a/b.c` and port 80 on line 1, followed by `rest`.
fn with_service(rest: &str) -> String {
    format!(
        "services: [{{name: b, namespace: a, hostname: b.c, vips: [], ports: {{80: 0}}}}]\n{rest}"
    )
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
