//! What is asked for by name: addresses, where not the whole mesh is wanted, and the endpoints of
//! clusters.
//!
//! What a gateway needs is known without any request: the services that it exposes, those behind
//! aliases, those that the control plane exports, and their waypoints; and what clusters name. So
//! no tunnel waits for a name, and no peer can make us ask for one. The workloads of a service come
//! with it. The other names of a family are asked for where the control plane has said that it does
//! not know the one that the configuration says, so that no more is asked for than can be of use.

use std::collections::BTreeSet;
use std::future::pending;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tracing::warn;

use super::cache::Recorder;
use super::client::{Client, Request};
use super::envoy::ENDPOINT;
use super::store::ADDRESS;
use crate::snapshot::mesh::Place;
use crate::snapshot::{NameTable, Reader, Snapshot};

/// How long readiness waits for what is wanted at first.
const ANSWERS_MAX: Duration = Duration::from_secs(5);

/// What is wanted, from time to time.
#[derive(Debug)]
pub(super) struct Demand {
    of: Of,
    deadline: Option<Instant>,
    settled: bool,
}

/// Who says what is wanted.
#[derive(Debug)]
enum Of {
    /// The snapshot, of addresses.
    Snapshot(Services),
    /// Clusters, of endpoints.
    Clusters,
}

/// The services that a snapshot needs.
#[derive(Debug)]
struct Services {
    reader: Reader,
    generation: watch::Receiver<u64>,
    /// Exports that cannot be asked for; the log has them.
    nameless: BTreeSet<String>,
    /// How many names had no answer when this was looked up last.
    unanswered: usize,
}

impl Demand {
    /// The addresses that this reader's snapshots want.
    pub(super) fn of_snapshots(reader: Reader) -> Self {
        let generation = reader.generation();
        Self::new(Of::Snapshot(Services {
            reader,
            generation,
            nameless: BTreeSet::new(),
            unanswered: 0,
        }))
    }

    /// The endpoints that clusters want.
    pub(super) fn of_clusters() -> Self {
        Self::new(Of::Clusters)
    }

    fn new(of: Of) -> Self {
        Self {
            of,
            deadline: None,
            settled: false,
        }
    }

    /// A stream begins: what is wanted is looked up whether it has changed or not.
    pub(super) fn begin(&mut self) {
        if let Of::Snapshot(services) = &mut self.of {
            services.generation.mark_changed();
        }
    }

    /// Waits until something else may be wanted, or the wait for answers is over.
    pub(super) async fn wake(&mut self) {
        let over = async |deadline: Option<Instant>| match deadline {
            Some(deadline) => sleep_until(deadline).await,
            None => pending().await,
        };
        let deadline = self.deadline.filter(|_| !self.settled);
        let Of::Snapshot(services) = &mut self.of else {
            return over(deadline).await;
        };
        tokio::select! {
            // The publisher lives as long as the stream.
            _ = services.generation.changed() => {}
            () = over(deadline) => {}
        }
        services.generation.mark_changed();
    }

    /// Wants what is wanted by now, and drops the rest from the store. Returns the changes of the
    /// subscription.
    pub(super) fn follow(&mut self, client: &mut Client, store: &mut Recorder) -> Vec<Request> {
        match &mut self.of {
            Of::Snapshot(services) => services.follow(client, store),
            Of::Clusters => {
                let names = store.store.take_wanted();
                names.map_or_else(Vec::new, |names| client.want(ENDPOINT, &names, store))
            }
        }
    }

    /// Whether all that was wanted at first has come or does not exist, or has been waited for.
    pub(super) fn is_settled(&mut self, client: &Client) -> bool {
        if !self.settled && client.is_synced() {
            let type_url = match self.of {
                Of::Snapshot(_) => ADDRESS,
                Of::Clusters => ENDPOINT,
            };
            let now = Instant::now();
            let deadline = *self.deadline.get_or_insert(now + ANSWERS_MAX);
            self.settled = client.unanswered(type_url) == 0 || deadline <= now;
        }
        self.settled
    }
}

impl Services {
    fn follow(&mut self, client: &mut Client, store: &mut Recorder) -> Vec<Request> {
        // Without a publisher nothing changes.
        let moved = self.generation.has_changed().unwrap_or(false);
        self.generation.mark_unchanged();
        let answered = self.unanswered != client.unanswered(ADDRESS);
        if !(store.store.take_services_changed() | moved | answered) {
            return Vec::new();
        }
        let names = self.names(&self.reader.snapshot(), |name| client.lacks(ADDRESS, name));
        let requests = client.want(ADDRESS, &names, store);
        self.unanswered = client.unanswered(ADDRESS);
        requests
    }

    /// The names that are wanted; `lacks` says of one whether the control plane has none.
    fn names(&mut self, snapshot: &Snapshot, lacks: impl Fn(&str) -> bool) -> BTreeSet<String> {
        let (mut names, mut nameless) = (BTreeSet::new(), BTreeSet::new());
        let table = &snapshot.names;
        for host in snapshot.exports.hosts() {
            match name_of(table, host) {
                Some(name) => drop(names.insert(name)),
                None => drop(nameless.insert(host.to_owned())),
            }
        }
        for host in nameless.difference(&self.nameless) {
            warn!(
                ?host,
                "an exported service is not in Kubernetes and cannot be asked for; \
                write `discovery: {{on_demand: false}}`"
            );
        }
        self.nameless = nameless;
        // Of configured hosts the configuration's check says it.
        let exported = snapshot.scope.exported.iter().map(|host| &**host);
        let configured = snapshot.exposure.hosts().chain(table.targets());
        for host in configured.chain(exported) {
            let namespace = snapshot.exposure.namespace(host);
            let name_of = |host: &str| match namespace {
                Some(namespace) => Some(format!("{namespace}/{host}")),
                None => name_of(table, host),
            };
            let Some(name) = name_of(host) else {
                continue;
            };
            if lacks(&name) {
                let family = table.stem(host).into_iter();
                let family = family.flat_map(|stem| table.family(stem));
                names.extend(family.filter_map(|host| name_of(&host)));
            }
            names.insert(name);
        }
        let services = names.iter().map(|name| snapshot.mesh.services.get(&**name));
        let waypoints = services.flatten().flat_map(|service| &service.waypoints);
        let mut places = Vec::new();
        for waypoint in waypoints {
            match &waypoint.gateway.place {
                Place::Name(name) => places.push(name.clone()),
                Place::Address(network, ip) => {
                    places.push(format!("{network}/{ip}"));
                    // Its workloads are members of it by its own name.
                    let service = snapshot.by_vip(*ip).map(|service| &service.definition);
                    places.extend(service.map(|of| format!("{}/{}", of.namespace, of.hostname)));
                }
            }
        }
        names.extend(places);
        // Our own pod's record has our locality.
        let own = snapshot.balancing.position.record.as_deref();
        names.extend(own.map(ToOwned::to_owned));
        names
    }
}

/// The name that a service of Kubernetes or of a family is asked for by, `namespace/hostname`; none
/// of any other host.
pub fn name_of(names: &NameTable, host: &str) -> Option<String> {
    let namespace = names.owner(host)?;
    Some(format!("{namespace}/{host}"))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::snapshot::builder::Change;
    use crate::snapshot::mesh::{GatewayAddress, Mesh, Service, Waypoint};
    use crate::snapshot::{Alias, Exposure, ExposureTable, Publisher};
    use crate::xds::client::{Mode, Response, Subscription};

    fn names() -> NameTable {
        let to = vec![("behind.app.mesh.internal".into(), None)];
        let alias = Alias::new(("one.global", None), to, None, None);
        let suffixes = ["svc.cluster.local", "mesh.internal"];
        NameTable::new(suffixes, [("one.global", alias)])
    }

    #[test]
    fn a_service_of_kubernetes_is_asked_for_by_its_namespace_and_host() {
        for (host, name) in [
            (
                "echo.app.svc.cluster.local",
                Some("app/echo.app.svc.cluster.local"),
            ),
            ("echo.app.svc.x", Some("app/echo.app.svc.x")),
            ("echo.app.svc", None),
            ("echo.app.mesh.internal", Some("app/echo.app.mesh.internal")),
            ("*.app.mesh.internal", None),
            ("echo.mesh.internal", None),
            ("*.app.svc.cluster.local", None),
            ("echo..svc.cluster.local", None),
            ("example.com", None),
            ("", None),
        ] {
            assert_eq!(name_of(&names(), host).as_deref(), name, "{host}");
        }
    }

    fn host(name: &str) -> String {
        format!("{name}.app.svc.cluster.local")
    }

    fn service(name: &str, places: Vec<Place>) -> Service {
        let waypoint = |place| Waypoint {
            gateway: GatewayAddress { place, port: 15008 },
            weight: 1,
        };
        let vips = match name {
            "way2" => vec![("east".to_owned(), [240, 0, 0, 9].into())],
            _ => Vec::new(),
        };
        Service {
            namespace: "app".into(),
            hostname: host(name).as_str().into(),
            waypoints: places.into_iter().map(waypoint).collect(),
            vips,
            ..Service::default()
        }
    }

    #[test]
    fn exposed_and_exported_services_are_wanted_and_their_waypoints() {
        let publisher = Publisher::new();
        let mut table = ExposureTable::new(false);
        let anyone = Exposure::default();
        table.expose(&host("shown"), &anyone, [("alias.example", None)]);
        table.expose("example.com", &anyone, []);
        let (exported, other) = (host("exported"), "else.example".to_owned());
        let exports = [
            (exported.as_str(), 80),
            (exported.as_str(), 81),
            (&*other, 80),
        ];
        let way2 = Place::Address("east".into(), [240, 0, 0, 9].into());
        let places = vec![Place::Name(format!("app/{}", host("way1"))), way2];
        let services = [
            service("shown", places),
            service("way2", Vec::new()),
            service("unrelated", vec![Place::Name("app/never".into())]),
        ];
        publisher.update(Change {
            mesh: Some((Mesh::new(services, []), Arc::from("east"))),
            exposure: Some(table),
            names: Some(names()),
            exports: Some(exports.into_iter().collect()),
            ..Change::default()
        });
        let Of::Snapshot(mut services) = Demand::of_snapshots(publisher.reader()).of else {
            panic!("of another kind");
        };
        let snapshot = publisher.reader().snapshot();
        let wanted =
            ["exported", "shown", "way1", "way2"].map(|name| format!("app/{}", host(name)));
        let others = ["east/240.0.0.9", "app/behind.app.mesh.internal"].map(str::to_owned);
        let mut wanted: BTreeSet<_> = wanted.into_iter().chain(others).collect();
        assert_eq!(services.names(&snapshot, |_| false), wanted);
        assert_eq!(services.nameless, [other].into());
        // What is not known by the configured name may be known by another one of its family.
        let lacks = |name: &str| name.contains("/behind.") || name.contains("/shown.");
        let more = ["behind.app.svc.cluster.local", "shown.app.mesh.internal"];
        wanted.extend(more.map(|host| format!("app/{host}")));
        assert_eq!(services.names(&snapshot, lacks), wanted);
    }

    #[tokio::test(start_paused = true)]
    async fn readiness_waits_for_answers_and_not_for_ever() {
        let publisher = Publisher::new();
        for answered in [true, false] {
            let mut demand = Demand::of_snapshots(publisher.reader());
            let addresses = Subscription {
                type_url: ADDRESS,
                mode: Mode::OnDemand,
            };
            let (mut client, mut store) = (Client::new(vec![addresses]), Recorder::default());
            client.connected();
            let names = [format!("app/{}", host("gone"))].into();
            client.want(ADDRESS, &names, &mut store);
            assert!(!demand.is_settled(&client));
            let began = Instant::now();
            if answered {
                let response = Response {
                    type_url: ADDRESS.to_owned(),
                    removed: names.into_iter().collect(),
                    ..Response::default()
                };
                client.received(response, &mut store);
            } else {
                demand.wake().await;
            }
            assert!(demand.is_settled(&client));
            let waited = Instant::now() - began;
            assert_eq!(waited >= ANSWERS_MAX, !answered, "{waited:?}");
        }
    }
}
