//! Cases of Kubernetes objects: the entries that they add to a configuration, and the mesh of the
//! objects of several clusters.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

use serde_json::Value;
use strait::config::{Config, SUFFIXES};
use strait::snapshot::builder::{Change, build};
use strait::snapshot::mesh::{Mesh, Service, Workload};
use strait::snapshot::{NameTable, Snapshot};
use strait::xds;
use strait::xds::objects::{AddressHolders, JoinResult, Objects, distribute, join, load, merge};
use strait::yaml::Findings;

use crate::findings::{ROOT, base, compare, each_row, partition};

/// Keys of a case that are no sections of the gateway.
const OWN: [&str; 3] = ["before", "mesh", "objects"];

/// Objects, and what is known before they are read.
#[derive(Default, serde::Deserialize)]
#[serde(default)]
struct Keys {
    /// Objects of earlier reloads, in their order.
    before: Vec<String>,
    mesh: String,
    objects: String,
}

struct Case {
    keys: Keys,
    gateway: Config,
    mesh: Mesh,
    folder: tempfile::TempDir,
}

impl Case {
    fn parse(text: &str) -> Self {
        let (own, gateway) = partition(text, |key| OWN.contains(&key));
        let keys: Option<Keys> = serde_saphyr::from_str(&own).expect("a case");
        let keys = keys.unwrap_or_default();
        let path = Path::new(ROOT).join("strait.yaml");
        let (Some(gateway), _) = Config::parse(&path, &gateway) else {
            panic!("no gateway in {text}");
        };
        let mesh = match &*keys.mesh {
            "" => Mesh::default(),
            text => xds::file::parse(Path::new("mesh.yaml"), text).expect("a mesh").0,
        };
        Self { keys, gateway, mesh, folder: tempfile::tempdir().expect("a folder") }
    }

    fn load(&self, text: &str) -> (Objects, Findings) {
        let file = self.folder.path().join("objects.yaml");
        std::fs::write(&file, text).expect("a file");
        load(&[file]).unwrap_or_else(|findings| (Objects::default(), findings))
    }

    /// Returns the entries of objects, and the findings.
    fn merged(&self) -> String {
        let (objects, read) = self.load(&self.keys.objects);
        let (mut config, merged) = merge(&self.gateway, &objects, &self.mesh);
        let mesh = (!self.keys.mesh.is_empty()).then_some(&self.mesh);
        let distributed = distribute(&mut config, &objects, mesh);
        let mut lines = BTreeSet::new();
        if config == self.gateway {
            lines.insert("the configuration is unchanged".to_owned());
        }
        let services = config.exposure.services.iter().filter(|one| one.is_of_object);
        lines.extend(services.map(|one| entry("exposed", one.line.number(), one)));
        let bindings = config.bindings.iter().filter(|one| !one.objects.is_empty());
        lines.extend(bindings.map(|one| entry("bound", one.line.number(), one)));
        let traffic = config.traffic.iter().filter(|one| !self.gateway.traffic.contains(one));
        lines.extend(traffic.map(|one| {
            let namespaces = one.namespace.iter().chain(one.alias_namespaces.iter());
            let namespaces: Vec<_> = namespaces.map(ToString::to_string).collect();
            let entry = entry("distributed", one.line.number(), one);
            format!("{entry} for namespaces {namespaces:?}")
        }));
        self.shown(&lines, [read, merged, distributed])
    }

    /// Returns the mesh of the objects, and the findings.
    fn joined(&self) -> String {
        let mut held = AddressHolders::default();
        for before in &self.keys.before {
            held = join(&self.mesh, &self.load(before).0, &self.gateway, &held).holders;
        }
        let (objects, read) = self.load(&self.keys.objects);
        let joined = join(&self.mesh, &objects, &self.gateway, &held);
        let lines = mesh(&self.gateway, &joined);
        self.shown(&lines, [read, joined.warnings, joined.conflicts])
    }

    /// Returns the lines, and the findings in their order.
    fn shown<const N: usize>(&self, lines: &BTreeSet<String>, findings: [Findings; N]) -> String {
        let mut shown: String = lines.iter().fold(String::new(), |all, one| all + one + "\n");
        for finding in findings.iter().flat_map(|findings| &findings.0) {
            let _ = writeln!(shown, "{finding}");
        }
        shown.replace(&format!("{}/", self.folder.path().display()), "")
    }
}

#[test]
fn entries_of_objects_in_the_configuration() {
    compare("merge", &base("merge"), |_, text| each_row(text, |text| Case::parse(text).merged()));
}

#[test]
fn meshes_of_the_objects_of_several_clusters() {
    compare("join", &base("join"), |_, text| each_row(text, |text| Case::parse(text).joined()));
}

/// Returns an entry without the keys that have no value.
fn entry(kind: &str, line: u64, entry: &impl serde::Serialize) -> String {
    let mut shown = serde_json::to_value(entry).expect("JSON");
    shorten(&mut shown);
    format!("{kind}, line {line}: {shown}")
}

fn shorten(value: &mut Value) {
    if let Value::Object(fields) = value {
        fields.values_mut().for_each(shorten);
        let none = [Value::Null, Value::Bool(false), "".into(), Value::Array(Vec::new())];
        fields.retain(|_, one| !none.contains(one) && *one != serde_json::json!({}));
    }
}

/// Returns a line for each service and each workload.
fn mesh(gateway: &Config, joined: &JoinResult) -> BTreeSet<String> {
    let network = gateway.gateway.network.as_str();
    let change = Change {
        mesh: Some((joined.mesh.clone(), network.into())),
        scope: Some(joined.scope.clone()),
        names: Some(NameTable::new(SUFFIXES, [])),
        ..Change::default()
    };
    let snapshot = build(&Snapshot::default(), change);
    let services = joined.mesh.services.values();
    let mut lines: BTreeSet<_> = services.map(|one| service(&snapshot, joined, one)).collect();
    let names = joined.scope.exported.iter().chain(&joined.scope.local);
    let mut others: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
    for name in names.filter(|name| snapshot.services.get(&***name).is_none()) {
        let leads = snapshot.service_by_name(name).map(|to| format!(" to {}", to.hostname));
        let reach = scope(&snapshot, joined, name) + &leads.unwrap_or_default();
        others.entry(reach).or_default().insert(name);
    }
    lines.extend(others.into_iter().map(|(reach, names)| {
        format!("names {}{reach}", names.into_iter().collect::<Vec<_>>().join(", "))
    }));
    lines.extend(joined.mesh.workloads.values().map(|one| workload(one)));
    lines
}

/// Describes how far a name reaches.
fn scope(snapshot: &Snapshot, joined: &JoinResult, host: &str) -> String {
    let of = joined.scope.exported.contains(host).then_some(" exported").into_iter();
    let of = of.chain(joined.scope.local.contains(host).then_some(" local"));
    let at_80 = snapshot.is_exported(host, 80).then_some(" and reachable");
    of.chain(at_80).collect()
}

fn service(snapshot: &Snapshot, joined: &JoinResult, of: &Service) -> String {
    let mut line = format!("service {}{}", of.hostname, scope(snapshot, joined, &of.hostname));
    for (port, target) in &of.ports {
        let _ = write!(line, ", {port}:{target} at");
        let built = snapshot.services.get(&of.hostname).and_then(|one| one.ports.get(port));
        let endpoints = built.into_iter().flat_map(|set| &set.endpoints);
        let endpoints: BTreeSet<_> = endpoints.map(|one| one.address.to_string()).collect();
        endpoints.iter().for_each(|one| _ = write!(line, " {one}"));
    }
    for (network, ip) in &of.vips {
        let _ = write!(line, ", address {network}/{ip}");
    }
    for waypoint in &of.waypoints {
        let _ = write!(line, ", waypoint {}:{}", waypoint.gateway.place, waypoint.gateway.port);
    }
    if snapshot.lacks_waypoint(of) {
        line += " that takes no tunnels";
    }
    if let Some(preferences) = &of.preferences {
        let _ = write!(line, ", prefers {preferences:?}");
    }
    line
}

fn workload(of: &Workload) -> String {
    let template = &of.template;
    let addresses: Vec<_> = of.addresses.iter().map(ToString::to_string).collect();
    let services: BTreeMap<_, BTreeMap<_, _>> =
        of.services.iter().map(|(name, ports)| (name, ports.iter().collect())).collect();
    let place = [&template.locality.region, &template.locality.zone, &of.node];
    let state = if of.healthy { "" } else { " not ready" };
    format!(
        "workload {} at {}{state}, {:?} in {} of {} by {place:?}, capacity {}, {services:?}",
        of.uid,
        addresses.join(" "),
        template.protocol,
        template.cluster,
        template.network,
        of.capacity,
    )
}
