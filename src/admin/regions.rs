//! `/drain/region`: evacuation of a region by an operator, and its reversal. POST executes it;
//! GET returns a preview of the same POST.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::extract::{Query, State};
use axum::http::{Method, StatusCode};
use serde::Deserialize;

use super::AdminState;
use super::text::escape_control;
use super::view::key_of;
use crate::config::{self, Listener, ListenerProtocol};
use crate::snapshot::builder::{self, Change};
use crate::snapshot::traffic::Override;
use crate::snapshot::{BoundEndpoints, EndpointSet, Locality, Service, Shards, Snapshot};
use crate::wire::RegionPattern;

/// Maximum number of evacuated regions. Each workload is compared with all of them.
const EVACUATED_MAX: usize = 64;

/// Maximum number of services or regions in an answer.
const NAMED_MAX: usize = 50;

/// Services by hostname, or derived services by label.
type ServicesByName = Shards<Arc<str>, Arc<Service>>;

/// Query parameters: `?region=REGION`, with `?undo` and `?force`, which need no value. Unknown
/// parameters are errors, because a typo would change the effect.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Parameters {
    region: Option<String>,
    undo: Option<String>,
    force: Option<String>,
}

/// Request of an operator about a region.
struct DrainRequest {
    region: RegionPattern,
    /// True if an evacuation is undone.
    undo: bool,
    /// True to evacuate even if a service or a binding would lose its last endpoints.
    force: bool,
    /// True for the execution, false for a preview.
    is_execution: bool,
}

/// Evacuates a region or undoes that, and reports the result. GET reports the result that the
/// same POST would have.
pub(super) async fn drain(
    method: Method,
    State(state): State<AdminState>,
    Query(parameters): Query<Parameters>,
) -> (StatusCode, String) {
    let region = parameters.region.as_deref().and_then(RegionPattern::parse);
    let Some(region) = region else {
        let text = "write ?region=REGION, a region, REGION/ZONE or REGION/ZONE/SUBZONE\n";
        return (StatusCode::BAD_REQUEST, text.to_owned());
    };
    if region.part_count() == 0 {
        let text = "cannot evacuate every region; to stop this gateway use /quitquitquit\n";
        return (StatusCode::BAD_REQUEST, text.to_owned());
    }
    let order = DrainRequest {
        region,
        undo: parameters.undo.is_some(),
        force: parameters.force.is_some(),
        is_execution: method == Method::POST,
    };
    // On a blocking thread: evaluating all services of a large mesh takes long.
    tokio::task::spawn_blocking(move || order.run(&state))
        .await
        .unwrap_or_else(|_| (StatusCode::INTERNAL_SERVER_ERROR, String::new()))
}

impl DrainRequest {
    /// Builds the next snapshot and evaluates it. Publishes it if this is no preview.
    fn run(&self, state: &AdminState) -> (StatusCode, String) {
        let region = self.region.clone();
        let overrides = if self.undo {
            Override::Restore(region)
        } else {
            Override::Evacuate(region)
        };
        let change = Change {
            overrides: Some(overrides),
            ..Change::default()
        };
        let config = state.config.load();
        let check = |before: &Snapshot, next: &Snapshot| {
            if self.undo {
                self.undo(before)
            } else {
                let mut lost = services_without_endpoints(&config.listeners, before, next);
                lost.extend(bindings_without_gateways(&config.bindings, before, next));
                self.evacuate((before, next), &lost)
            }
        };
        if !self.is_execution {
            let before = state.reader.snapshot();
            return match check(&before, &builder::build(&before, change)) {
                Ok(text) => (StatusCode::OK, format!("{text}nothing was changed\n")),
                Err(refused) => refused,
            };
        }
        match state.publisher.update_if(change, check) {
            Ok(text) => {
                let region = &self.region;
                if self.undo {
                    tracing::info!(%region, "evacuation of a region undone");
                } else {
                    tracing::info!(%region, force = self.force, "region evacuated");
                }
                (StatusCode::OK, text)
            }
            Err(refused) => refused,
        }
    }

    fn evacuate(
        &self,
        (before, next): (&Snapshot, &Snapshot),
        lost: &BTreeSet<String>,
    ) -> Result<String, (StatusCode, String)> {
        let Self { region, .. } = self;
        let evacuated = &before.balancing.evacuated;
        let is_new = !evacuated.contains(region);
        let (all, there) = (next.mesh.workloads.len(), count(next, region));
        if there == 0 && is_new {
            let hint = known_places_hint(next, region);
            let text = format!("{region} cannot be evacuated: no workload is there{hint}\n");
            return Err((StatusCode::NOT_FOUND, text));
        }
        if is_new && evacuated.len() >= EVACUATED_MAX {
            let text = format!("{EVACUATED_MAX} regions are evacuated already; undo one of them\n");
            return Err((StatusCode::CONFLICT, text));
        }
        let names = join_names(lost);
        if !lost.is_empty() && !self.force {
            let text = format!(
                "{region} is not evacuated: no endpoint would be left for {names}; write --force \
                 to refuse their tunnels\n"
            );
            return Err((StatusCode::CONFLICT, text));
        }
        let is = self.tense();
        let mut text = format!(
            "{region} {is} evacuated: new tunnels avoid it, open ones go on; it ends with --undo \
             or a restart\n{there} of {all} workloads are there\n"
        );
        if !lost.is_empty() {
            text += &format!("no endpoint {is} left, and tunnels are rejected: {names}\n");
        }
        Ok(text)
    }

    fn undo(&self, before: &Snapshot) -> Result<String, (StatusCode, String)> {
        let Self { region, .. } = self;
        let evacuated = &before.balancing.evacuated;
        if evacuated.contains(region) {
            return Ok(format!("{region} {} used again\n", self.tense()));
        }
        let others = if evacuated.is_empty() {
            "no region is".to_owned()
        } else {
            let all = evacuated.iter().map(ToString::to_string);
            format!("these are: {}", join_names(&all.collect()))
        };
        let text = format!("{region} was not evacuated by an operator; {others}\n");
        Err((StatusCode::NOT_FOUND, text))
    }

    fn tense(&self) -> &'static str {
        if self.is_execution { "is" } else { "would be" }
    }
}

/// Counts the workloads of a region.
fn count(snapshot: &Snapshot, region: &RegionPattern) -> usize {
    let workloads = snapshot.mesh.workloads.values();
    let is_there = |one: &Locality| region.matches(&one.region, &one.zone, &one.subzone);
    workloads.filter(|one| is_there(&one.locality)).count()
}

/// Returns a hint with the localities of the mesh, at the depth of the requested one.
fn known_places_hint(snapshot: &Snapshot, requested: &RegionPattern) -> String {
    let workloads = snapshot.mesh.workloads.values();
    let place = |one: &Locality| {
        let parts = [&one.region, &one.zone, &one.subzone].map(|part| &**part);
        let parts = parts.into_iter().take(requested.part_count());
        let parts: Vec<_> = parts.take_while(|part| !part.is_empty()).collect();
        parts.join("/")
    };
    let mut places: BTreeSet<_> = workloads.map(|one| place(&one.locality)).collect();
    places.remove("");
    if places.is_empty() {
        return ", as no `workloads[].locality` names a region".to_owned();
    }
    format!("; write one of {}", join_names(&places))
}

/// Joins the names, at most [`NAMED_MAX`] of them.
fn join_names(names: &BTreeSet<String>) -> String {
    let first: Vec<_> = names
        .iter()
        .take(NAMED_MAX)
        .map(|name| escape_control(name))
        .collect();
    match names.len() - first.len() {
        0 => first.join(", "),
        more => format!("{} and {more} more", first.join(", ")),
    }
}

/// Returns the services (`namespace/hostname`) and aliases that lose their last endpoint on a
/// port, or the last waypoint for their tunnels.
fn services_without_endpoints(
    listeners: &[Listener],
    before: &Snapshot,
    next: &Snapshot,
) -> BTreeSet<String> {
    let key = |service: &Service| key_of(&service.definition);
    let lost_in = |old: &ServicesByName, new: &ServicesByName| {
        let same = |(host, old): (&Arc<str>, &Arc<Service>)| {
            Some((Arc::clone(old), new.get(host)?.clone()))
        };
        let changed = old
            .iter()
            .filter_map(same)
            .filter(|(old, new)| !Arc::ptr_eq(old, new));
        let lost = changed.filter(|(old, new)| loses_endpoints(listeners, before, (old, new)));
        lost.map(|(old, _)| old).collect::<Vec<_>>()
    };
    let services = lost_in(&before.services, &next.services);
    let aliases = lost_in(&before.derived_services, &next.derived_services);
    let aliases = aliases.iter().map(|of| format!("alias {}", of.hostname));
    let all = before.services.values();
    let stranded = all.filter(|service| {
        let definition = &service.definition;
        next.lacks_waypoint(definition) && !before.lacks_waypoint(definition)
    });
    let stranded = stranded.map(|service| key(service));
    let lost = services.iter().map(|service| key(service)).chain(aliases);
    lost.chain(stranded).collect()
}

/// Returns whether peers of a listener lose the last endpoint of a port, in this network or in
/// those that they may use.
fn loses_endpoints(
    listeners: &[Listener],
    before: &Snapshot,
    (old, new): (&Service, &Service),
) -> bool {
    let is_empty = |set: Option<&Arc<EndpointSet>>| set.is_none_or(|set| set.endpoints.is_empty());
    let by_transit = |of: &Service, port: u16, transit| {
        is_empty(
            of.endpoints_by(port, transit)
                .or_else(|| of.ports.get(&port)),
        )
    };
    let limits: BTreeSet<_> = listeners
        .iter()
        .filter_map(|of| match of.protocol {
            ListenerProtocol::Hbone { transit, .. } => Some(transit),
            _ => None,
        })
        .collect();
    let is_lost = |port: &u16| {
        let granted = before.transits(old, *port);
        let used = granted
            .iter()
            .flat_map(|of| limits.iter().map(|limit| *of.min(limit)));
        let used: BTreeSet<_> = used.collect();
        used.into_iter()
            .any(|transit| !by_transit(old, *port, transit) && by_transit(new, *port, transit))
    };
    let mut passthrough = old.passthrough_ports.iter();
    old.ports.keys().any(is_lost)
        || passthrough
            .any(|(port, set)| !is_empty(Some(set)) && is_empty(new.passthrough_ports.get(port)))
}

/// Returns the bindings that lose their last gateway.
fn bindings_without_gateways(
    bindings: &[config::Binding],
    before: &Snapshot,
    next: &Snapshot,
) -> Vec<String> {
    let lost = bindings.iter().filter(|binding| {
        let clusters = binding.cluster.iter().map(|of| of.as_str().into());
        let (host, port) = (binding.service.host.as_str(), binding.service.port);
        let gateways = BoundEndpoints::new(clusters, host.into(), port.unwrap_or_default());
        gateways.is_empty_in(next) && !gateways.is_empty_in(before)
    });
    lost.map(|binding| format!("binding {}", binding.service))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::admin_router;
    use super::super::tests::{Fixture, ask, fixture, mesh};
    use super::*;
    use crate::snapshot::mesh::Mesh;
    use crate::snapshot::{Exposure, ExposureTable, Protocol, mesh};
    use crate::wire::Transit;

    /// Adds a copy of the usual mesh's workload in each of the regions.
    fn located(fixture: &Fixture, regions: &[&str]) {
        let mut mesh = mesh();
        let first = Arc::clone(mesh.workloads.sorted()[0]);
        for (index, region) in regions.iter().enumerate() {
            let mut workload = first.as_ref().clone();
            if index > 0 {
                workload.uid = format!("{}-{index}", first.uid).into();
            }
            workload.locality = Arc::new(Locality {
                region: (*region).into(),
                ..Locality::default()
            });
            let uid = Arc::clone(&workload.uid);
            mesh.workloads.insert(uid, Arc::new(workload));
        }
        fixture.publisher.update(Change {
            mesh: Some((mesh, "east".into())),
            ..Change::default()
        });
    }

    async fn request(fixture: &Fixture, method: &str, uri: &str) -> (StatusCode, String) {
        ask(admin_router(fixture.state.clone()), method, uri).await
    }

    #[tokio::test]
    async fn review_22_a_service_whose_waypoint_loses_its_endpoints_is_named() {
        let fixture = fixture();
        let mut mesh = mesh();
        let waypoint = Arc::clone(mesh.services.sorted()[0]);
        let name = key_of(&waypoint);
        let gateway = mesh::GatewayAddress {
            place: mesh::Place::Name(name.clone()),
            port: crate::wire::HBONE_PORT,
        };
        let behind = mesh::Service {
            name: "behind".into(),
            namespace: "app".into(),
            hostname: "behind.app".into(),
            waypoints: vec![mesh::Waypoint { gateway, weight: 1 }],
            ..mesh::Service::default()
        };
        mesh.services
            .insert("app/behind.app".into(), Arc::new(behind));
        let mut workload = mesh.workloads.sorted()[0].as_ref().clone();
        workload.locality = Arc::new(Locality {
            region: "us-east-2".into(),
            ..Locality::default()
        });
        workload.protocol = Protocol::Hbone;
        let uid = Arc::clone(&workload.uid);
        mesh.workloads.insert(uid, Arc::new(workload));
        fixture.publisher.update(Change {
            mesh: Some((mesh, "east".into())),
            ..Change::default()
        });
        let order = "/drain/region?region=us-east-2";
        let (_, text) = request(&fixture, "GET", order).await;
        assert!(text.contains(&name), "{text}");
        assert!(text.contains("app/behind.app"), "{text}");
    }

    /// Returns the usual mesh in us-east-2, with an instance in another network in us-west-2.
    fn mesh_of_two_networks() -> Mesh {
        let mut mesh = mesh();
        let local = Arc::clone(mesh.workloads.sorted()[0]);
        let mut add = |uid: &str, network: &str, region: &str, address: [u8; 4]| {
            let mut one = local.as_ref().clone();
            (one.uid, one.network) = (uid.into(), network.into());
            one.addresses = [address.into()].into();
            let region = region.into();
            one.locality = Arc::new(Locality {
                region,
                ..Locality::default()
            });
            mesh.workloads.insert(uid.into(), Arc::new(one));
        };
        add(&local.uid, "", "us-east-2", [10, 0, 0, 1]);
        add("west-1", "west", "us-west-2", [10, 0, 0, 1]);
        let record = "NetworkGateway/west/192.0.2.1/15008";
        add(record, "west", "us-west-2", [192, 0, 2, 1]);
        mesh
    }

    /// Publishes the mesh of two networks, and exposes its service.
    fn publish_two_networks(fixture: &Fixture, transit: Transit) {
        let mut exposure = ExposureTable::new(false);
        let entry = Exposure {
            transit: Some(transit),
            ..Exposure::default()
        };
        exposure.add_entry("echo.app", &entry, []);
        fixture.publisher.update(Change {
            mesh: Some((mesh_of_two_networks(), "east".into())),
            exposure: Some(exposure),
            ..Change::default()
        });
    }

    #[tokio::test]
    async fn an_instance_of_another_network_in_an_evacuated_region_names_the_evacuation() {
        let fixture = fixture();
        publish_two_networks(&fixture, Transit::Failover);
        let page = "/status?service=echo.app";
        let (_, before) = request(&fixture, "GET", page).await;
        assert!(before.contains("reached through its gateways"), "{before}");
        let (_, drained) = request(&fixture, "POST", "/drain/region?region=us-west-2").await;
        assert!(drained.contains("is evacuated"), "{drained}");
        let (_, after) = request(&fixture, "GET", page).await;
        let why = "in network west: region us-west-2 is evacuated (`strait drain region`)";
        assert!(after.contains(why), "{after}");
    }

    #[tokio::test]
    async fn a_binding_that_loses_its_last_gateway_is_named() {
        let fixture = fixture();
        let mut mesh = mesh_of_two_networks();
        let record = "NetworkGateway/west/192.0.2.1/15008";
        let mut gateway = mesh
            .workloads
            .get(record)
            .expect("a gateway")
            .as_ref()
            .clone();
        gateway.cluster = "west".into();
        mesh.workloads.insert(record.into(), Arc::new(gateway));
        fixture.publisher.update(Change {
            mesh: Some((mesh, "east".into())),
            ..Change::default()
        });
        let order = "/drain/region?region=us-west-2";
        let (status, text) = request(&fixture, "POST", order).await;
        assert_eq!(status, StatusCode::OK, "{text}");
        request(&fixture, "POST", &format!("{order}&undo")).await;
        fixture.bind("echo.app:80");
        for method in ["GET", "POST"] {
            let (status, text) = request(&fixture, method, order).await;
            let want = "no endpoint would be left for binding echo.app:80;";
            assert!(text.contains(want), "{text}");
            assert_eq!(status, StatusCode::CONFLICT);
        }
        let (status, _) = request(&fixture, "POST", &format!("{order}&force")).await;
        assert_eq!(status, StatusCode::OK);
    }

    #[tokio::test]
    async fn a_service_that_may_move_to_another_network_is_not_named() {
        let fixture = fixture();
        for (transit, is_named) in [(Transit::Off, true), (Transit::Failover, false)] {
            publish_two_networks(&fixture, transit);
            let order = "/drain/region?region=us-east-2";
            let (_, text) = request(&fixture, "GET", order).await;
            assert_eq!(text.contains("no endpoint"), is_named, "{transit}: {text}");
        }
    }

    #[tokio::test]
    async fn a_service_whose_last_endpoints_are_in_another_network_is_named() {
        let fixture = fixture();
        for (transit, is_ready_here, is_named) in [
            (Transit::Always, false, true),
            (Transit::Failover, false, true),
            (Transit::Off, false, false),
            (Transit::Always, true, false),
        ] {
            publish_two_networks(&fixture, transit);
            let mut mesh = mesh_of_two_networks();
            let all: Vec<_> = mesh.workloads.values().cloned().collect();
            for workload in all {
                let mut workload = workload.as_ref().clone();
                workload.healthy &= is_ready_here || !workload.network.is_empty();
                let uid = Arc::clone(&workload.uid);
                mesh.workloads.insert(uid, Arc::new(workload));
            }
            fixture.publisher.update(Change {
                mesh: Some((mesh, "east".into())),
                ..Change::default()
            });
            let order = "/drain/region?region=us-west-2";
            let (status, text) = request(&fixture, "GET", order).await;
            let case = format!("{transit} {is_ready_here}: {text}");
            assert_eq!(text.contains("left for app/echo.app;"), is_named, "{case}");
            assert_eq!(status == StatusCode::CONFLICT, is_named, "{case}");
        }
    }

    #[tokio::test]
    async fn a_region_is_evacuated_shown_and_put_back() {
        let fixture = fixture();
        located(&fixture, &["us-east-2"]);
        let order = "/drain/region?region=us-east-2/*&force";
        let (status, text) = request(&fixture, "POST", order).await;
        let want = "us-east-2 is evacuated: new tunnels avoid it, open ones go on; it ends with \
                    --undo or a restart\n1 of 1 workloads are there\nno endpoint is left, and \
                    tunnels are rejected: app/echo.app\n";
        assert_eq!((status, &*text), (StatusCode::OK, want));
        let (_, text) = request(&fixture, "GET", "/status").await;
        assert!(text.contains("\n  us-east-2 is evacuated; "), "{text}");
        let (_, text) = request(&fixture, "GET", "/status?service=echo").await;
        let why = "not used: region us-east-2 is evacuated (`strait drain region`)";
        assert!(text.contains(why), "{text}");
        let (_, dump) = request(&fixture, "GET", "/config_dump").await;
        let dump: serde_json::Value = serde_json::from_str(&dump).expect("JSON");
        assert_eq!(
            dump["strait"]["evacuated"],
            serde_json::json!(["us-east-2"])
        );
        let undo = "/drain/region?region=us-east-2&undo";
        let (status, text) = request(&fixture, "POST", undo).await;
        assert_eq!(
            (status, &*text),
            (StatusCode::OK, "us-east-2 is used again\n")
        );
        let (status, text) = request(&fixture, "POST", undo).await;
        assert_eq!(status, StatusCode::NOT_FOUND);
        assert!(text.ends_with("by an operator; no region is\n"), "{text}");
        let (_, text) = request(&fixture, "GET", "/status").await;
        assert!(!text.contains("evacuated"), "{text}");
    }

    #[tokio::test]
    async fn a_region_in_which_nothing_is_is_refused_with_those_that_there_are() {
        let fixture = fixture();
        for (place, text) in [
            (
                None,
                "no workload is there, as no `workloads[].locality` names a region\n",
            ),
            (
                Some("us-east-2"),
                "no workload is there; write one of us-east-2\n",
            ),
        ] {
            if let Some(place) = place {
                located(&fixture, &[place]);
            }
            for (method, order) in [("POST", ""), ("GET", ""), ("POST", "&force")] {
                let uri = format!("/drain/region?region=us-esat-2{order}");
                let (status, reported) = request(&fixture, method, &uri).await;
                let want = format!("us-esat-2 cannot be evacuated: {text}");
                assert_eq!((status, reported), (StatusCode::NOT_FOUND, want));
            }
        }
        let zone = "/drain/region?region=us-east-2/b";
        let (status, reported) = request(&fixture, "POST", zone).await;
        assert_eq!(status, StatusCode::NOT_FOUND);
        assert!(reported.ends_with("write one of us-east-2\n"), "{reported}");
        assert!(fixture.state.reader.load().balancing.evacuated.is_empty());
    }

    #[tokio::test]
    async fn what_leaves_a_service_without_endpoints_is_refused_without_force() {
        let fixture = fixture();
        located(&fixture, &["us-east-2"]);
        let uri = "/drain/region?region=us-east-2";
        for method in ["POST", "GET"] {
            let (status, text) = request(&fixture, method, uri).await;
            let want = "us-east-2 is not evacuated: no endpoint would be left for app/echo.app; \
                        write --force to refuse their tunnels\n";
            assert_eq!((status, &*text), (StatusCode::CONFLICT, want), "{method}");
        }
        let forced = format!("{uri}&force");
        let (status, text) = request(&fixture, "GET", &forced).await;
        let want = "us-east-2 would be evacuated: new tunnels avoid it, open ones go on; it ends \
                    with --undo or a restart\n1 of 1 workloads are there\nno endpoint would be \
                    left, and tunnels are rejected: app/echo.app\nnothing was changed\n";
        assert_eq!((status, &*text), (StatusCode::OK, want));
        assert!(fixture.state.reader.load().balancing.evacuated.is_empty());
        let (status, _) = request(&fixture, "POST", &forced).await;
        assert_eq!(status, StatusCode::OK);
        // It removes no further endpoint.
        let (status, _) = request(&fixture, "POST", uri).await;
        assert_eq!(status, StatusCode::OK);
        let (status, text) = request(&fixture, "GET", &format!("{uri}&undo")).await;
        let want = "us-east-2 would be used again\nnothing was changed\n";
        assert_eq!((status, &*text), (StatusCode::OK, want));
        assert_eq!(fixture.state.reader.load().balancing.evacuated.len(), 1);
        let (status, text) = request(&fixture, "POST", "/drain/region?region=mars&undo").await;
        assert_eq!(status, StatusCode::NOT_FOUND);
        assert!(text.ends_with("these are: us-east-2\n"), "{text}");
    }

    #[tokio::test]
    async fn what_is_no_region_or_too_much_is_refused() {
        let fixture = fixture();
        for uri in [
            "",
            "?region=",
            "?region=a//b",
            "?undo",
            "?region=*",
            "?region=r0&dryrun",
        ] {
            let (status, text) = request(&fixture, "POST", &format!("/drain/region{uri}")).await;
            assert_eq!(status, StatusCode::BAD_REQUEST, "{uri}: {text}");
        }
        let regions: Vec<_> = (0..=EVACUATED_MAX)
            .map(|index| format!("r{index}"))
            .collect();
        let regions: Vec<_> = regions.iter().map(String::as_str).collect();
        located(&fixture, &regions);
        for (index, region) in regions.iter().enumerate() {
            let uri = format!("/drain/region?region={region}&force");
            let (status, text) = request(&fixture, "POST", &uri).await;
            let fits = index < EVACUATED_MAX;
            assert_eq!(status == StatusCode::OK, fits, "{index}: {text}");
        }
        // A region that is already evacuated does not count again.
        let (status, _) = request(&fixture, "POST", "/drain/region?region=r0").await;
        assert_eq!(status, StatusCode::OK);
        assert_eq!(
            fixture.state.reader.load().balancing.evacuated.len(),
            EVACUATED_MAX
        );
    }
}
