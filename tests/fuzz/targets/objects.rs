//! Kubernetes objects in files.

use std::collections::HashSet;
use std::path::Path;
use std::sync::{Arc, LazyLock};

use strait::config::Config;
use strait::snapshot::Snapshot;
use strait::snapshot::builder::{Change, build};
use strait::snapshot::mesh::Mesh;
use strait::xds::objects;

use super::assert_refused;

/// Gateway in cluster east that exports everything that does not opt out.
static CONFIG: LazyLock<Config> = LazyLock::new(|| {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("strait.yaml");
    let text = "gateway: {cluster: east}
identity: {kind: files, chain: Cargo.toml, key: Cargo.toml, roots: Cargo.toml}
trust: {domains: [{name: east.local, cluster: east}, {name: west.local, cluster: west}]}
listeners: [{name: a, bind: '[::]:15008'}]
discovery: {kind: file, path: Cargo.toml}
exposure: {default: all, files: [Cargo.toml], bindings: {addresses: 127.64.0.0/10}}
";
    let (config, findings) = Config::parse(&file, text);
    config.unwrap_or_else(|| panic!("{findings}"))
});

/// Reads a text of objects, except for those with mistakes, or rejects it with findings. The result
/// is a mesh in which no service is both exported and kept, and nothing occurs twice.
pub fn objects(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let read = match objects::parse(Path::new("objects.yaml"), text) {
        Ok(read) => read,
        Err(findings) => return assert_refused(&findings),
    };
    let (config, _) = objects::merge(&CONFIG, &read, &Mesh::default());
    // Merging into the result again opens nothing more.
    let (again, _) = objects::merge(&config, &read, &Mesh::default());
    assert_eq!(again.exposure, config.exposure);
    assert_eq!(again.bindings, config.bindings);
    assert_eq!(again.traffic, config.traffic);
    let joined =
        objects::join(&Mesh::default(), &read, &config, &objects::AddressHolders::default());
    assert!(joined.scope.exported.is_disjoint(&joined.scope.local));
    assert!(!joined.warnings.has_errors());
    for workload in joined.mesh.workloads.values() {
        let mut served = workload.services.keys();
        assert!(served.all(|service| joined.mesh.services.contains_key(service)));
        assert!(workload.capacity <= 1, "nothing weighs double");
        let addresses: HashSet<_> = workload.addresses.iter().collect();
        assert_eq!(addresses.len(), workload.addresses.len());
    }
    // Joining the result again does not change it.
    let again = objects::join(&joined.mesh, &read, &config, &joined.holders);
    assert_eq!(again.mesh.workloads.len(), joined.mesh.workloads.len());
    assert_eq!(again.mesh.services, joined.mesh.services);
    let change = Change { mesh: Some((joined.mesh, Arc::from("east"))), ..Change::default() };
    build(&Snapshot::default(), change);
}
