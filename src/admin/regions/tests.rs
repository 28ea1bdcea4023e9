//! Tests of evacuations.

use super::super::admin_router;
use super::super::tests::{Fixture, ask, fixture, mesh};
use super::*;
use crate::config::ExposedService;
use crate::snapshot::mesh::Mesh;
use crate::snapshot::tests::entry;
use crate::snapshot::{ExposureTable, Protocol, mesh};
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
        workload.locality = Arc::new(Locality { region: (*region).into(), ..Locality::default() });
        let uid = Arc::clone(&workload.uid);
        mesh.workloads.insert(uid, Arc::new(workload));
    }
    fixture.publisher.update(Change { mesh: Some((mesh, "east".into())), ..Change::default() });
}

async fn request(fixture: &Fixture, method: &str, uri: &str) -> (StatusCode, String) {
    ask(admin_router(fixture.state.clone()), method, uri).await
}

#[tokio::test]
async fn a_service_whose_waypoint_loses_its_endpoints_is_named() {
    let fixture = fixture();
    let mut mesh = mesh();
    let waypoint = Arc::clone(mesh.services.sorted()[0]);
    let name = waypoint.key();
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
    mesh.services.insert("app/behind.app".into(), Arc::new(behind));
    let mut workload = mesh.workloads.sorted()[0].as_ref().clone();
    workload.locality = Arc::new(Locality { region: "us-east-2".into(), ..Locality::default() });
    workload.protocol = Protocol::Hbone;
    let uid = Arc::clone(&workload.uid);
    mesh.workloads.insert(uid, Arc::new(workload));
    fixture.publisher.update(Change { mesh: Some((mesh, "east".into())), ..Change::default() });
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
        one.locality = Arc::new(Locality { region, ..Locality::default() });
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
    exposure.add(ExposedService { transit: Some(transit), ..entry("echo.app", Vec::new()) });
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
    let mut gateway = mesh.workloads.get(record).expect("a gateway").as_ref().clone();
    gateway.cluster = "west".into();
    mesh.workloads.insert(record.into(), Arc::new(gateway));
    fixture.publisher.update(Change { mesh: Some((mesh, "east".into())), ..Change::default() });
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
async fn a_service_that_only_a_binding_names_is_drained() {
    let fixture = fixture();
    let mut mesh = mesh_of_two_networks();
    let record = "NetworkGateway/west/192.0.2.1/15008";
    let mut gateway = mesh.workloads.get(record).expect("a gateway").as_ref().clone();
    gateway.cluster = "west".into();
    mesh.workloads.insert(record.into(), Arc::new(gateway));
    fixture.publisher.update(Change { mesh: Some((mesh, "east".into())), ..Change::default() });
    let order = "/drain/service?service=elsewhere.app";
    assert_eq!(request(&fixture, "POST", order).await.0, StatusCode::NOT_FOUND);
    fixture.bind("elsewhere.app:80");
    let (status, text) = request(&fixture, "POST", order).await;
    assert_eq!(status, StatusCode::OK, "{text}");
    assert!(text.contains("1 of 2 services are there"), "{text}");
    assert!(text.contains("new tunnels are rejected, open ones go on"), "{text}");
    assert!(text.contains("tunnels are rejected: binding elsewhere.app:80"), "{text}");
    let (status, _) = request(&fixture, "POST", &format!("{order}&undo")).await;
    assert_eq!(status, StatusCode::OK);
}

#[tokio::test]
async fn an_order_and_its_preview_keep_no_set_of_a_service_that_nobody_uses() {
    let fixture = fixture();
    located(&fixture, &["us-east", "us-west"]);
    for method in ["GET", "POST"] {
        let (status, text) = request(&fixture, method, "/drain/region?region=us-east").await;
        assert_eq!(status, StatusCode::OK, "{text}");
        let snapshot = fixture.state.reader.snapshot();
        let mut sets = snapshot.services.values().flat_map(|service| service.ports.values());
        assert!(sets.all(|set| !set.is_built()), "{method}");
    }
}

#[tokio::test]
async fn an_order_that_cannot_be_stored_is_in_force_and_may_be_repeated() {
    let mut fixture = fixture();
    located(&fixture, &["us-east", "us-west"]);
    let order = "/drain/region?region=us-east";
    let (status, text) = request(&fixture, "POST", &format!("{order}&persist")).await;
    let want = "region us-east is not drained: `drain.file` is not set; set it and restart\n";
    assert_eq!((status, &*text), (StatusCode::CONFLICT, want));
    assert!(fixture.state.reader.snapshot().balancing.evacuated.is_empty());

    let mut config = fixture.state.config.load().as_ref().clone();
    config.drain.file = Some("drains".into());
    fixture.state.config.store(Arc::new(config));
    let (status, text) = request(&fixture, "POST", &format!("{order}&persist")).await;
    let want = "region us-east is drained, but a restart may end that: cannot write the file; \
                repeat it\n";
    assert_eq!((status, &*text), (StatusCode::CONFLICT, want));
    assert_eq!(fixture.state.reader.snapshot().balancing.evacuated.len(), 1);
    let undo = format!("{order}&undo");
    let (status, text) = request(&fixture, "POST", &undo).await;
    let want = "region us-east is used again, but a restart may drain it again: cannot write the \
                file; repeat it\n";
    assert_eq!((status, &*text), (StatusCode::CONFLICT, want));
    assert!(fixture.state.reader.snapshot().balancing.evacuated.is_empty());

    // While the file is out of date, an order that has been undone is undone again.
    *fixture.state.status.drain_problem.lock() = Some("cannot write the file".to_owned());
    assert_eq!(request(&fixture, "POST", &undo).await.0, StatusCode::CONFLICT);
    let status = Arc::clone(&fixture.state.status);
    fixture.state.store_drains = Arc::new(move || {
        *status.drain_problem.lock() = None;
        Ok(())
    });
    assert_eq!(request(&fixture, "POST", &undo).await.0, StatusCode::OK);
    assert_eq!(request(&fixture, "POST", &undo).await.0, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn no_order_is_executed_while_a_successor_starts() {
    let fixture = fixture();
    located(&fixture, &["us-east", "us-west"]);
    fixture.state.status.is_handing_over.store(true, Ordering::Relaxed);
    let order = "/drain/region?region=us-east";
    let (status, text) = request(&fixture, "POST", order).await;
    assert_eq!(status, StatusCode::CONFLICT);
    assert!(text.contains("the next process starts"), "{text}");
    assert!(fixture.state.reader.snapshot().balancing.evacuated.is_empty());
    fixture.state.status.is_handing_over.store(false, Ordering::Relaxed);
    assert_eq!(request(&fixture, "POST", order).await.0, StatusCode::OK);
}

#[tokio::test]
async fn an_order_during_which_a_successor_starts_is_not_confirmed() {
    let mut fixture = fixture();
    located(&fixture, &["us-east", "us-west"]);
    let status = Arc::clone(&fixture.state.status);
    fixture.state.store_drains = Arc::new(move || {
        status.is_handing_over.store(true, Ordering::Relaxed);
        Ok(())
    });
    let mut config = fixture.state.config.load().as_ref().clone();
    config.drain.file = Some("drains".into());
    fixture.state.config.store(Arc::new(config));
    let order = "/drain/region?region=us-east&persist";
    let (status, text) = request(&fixture, "POST", order).await;
    assert_eq!(status, StatusCode::CONFLICT, "{text}");
    assert!(text.contains("the next process starts"), "{text}");
}

#[tokio::test]
async fn a_drained_listener_without_a_name_in_the_configuration_is_a_problem() {
    let fixture = fixture();
    let target = DrainTarget::parse("listener", "former").expect("a listener");
    let order = Some(Override::Drain(target, Drained::now(false)));
    fixture.publisher.update(Change { overrides: order, ..Change::default() });
    let (_, page) = request(&fixture, "GET", "/status").await;
    let want = "listener former is drained, and `listeners[]` has no such name";
    assert!(page.contains(want), "{page}");
}

#[tokio::test]
async fn a_drained_service_has_no_endpoint_under_any_name() {
    let fixture = fixture();
    located(&fixture, &["us-east"]);
    let (status, text) = request(&fixture, "POST", "/drain/service?service=echo.app").await;
    assert_eq!(status, StatusCode::OK, "{text}");
    let snapshot = fixture.state.reader.snapshot();
    let service = snapshot.services.get("echo.app").expect("a service");
    assert_eq!(service.drained.as_ref().map(DrainTarget::name).as_deref(), Some("echo.app"));
    assert!(service.ports.values().all(|set| set.endpoints.is_empty()));
    request(&fixture, "POST", "/drain/service?service=echo.app&undo").await;
    let snapshot = fixture.state.reader.snapshot();
    let service = snapshot.services.get("echo.app").expect("a service");
    assert!(
        service.drained.is_none() && service.ports.values().any(|set| !set.endpoints.is_empty())
    );
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
        fixture.publisher.update(Change { mesh: Some((mesh, "east".into())), ..Change::default() });
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
    let want = "region us-east-2 is evacuated: new tunnels avoid it, open ones go on; it ends with \
                --undo or a restart\n1 of 1 workloads are there\nno endpoint is left, and \
                tunnels are rejected: app/echo.app\n";
    assert_eq!((status, &*text), (StatusCode::OK, want));
    let (_, text) = request(&fixture, "GET", "/status").await;
    assert!(text.contains(r#""evacuated":["us-east-2"]"#), "{text}");
    let (_, text) = request(&fixture, "GET", "/status?service=echo").await;
    let why = r#""unused":"region us-east-2 is evacuated (`strait drain region`)""#;
    assert!(text.contains(why), "{text}");
    let (_, dump) = request(&fixture, "GET", "/config_dump").await;
    let dump: serde_json::Value = serde_json::from_str(&dump).expect("JSON");
    assert_eq!(dump["strait"]["evacuated"], serde_json::json!(["us-east-2"]));
    let undo = "/drain/region?region=us-east-2&undo";
    let (status, text) = request(&fixture, "POST", undo).await;
    assert_eq!((status, &*text), (StatusCode::OK, "region us-east-2 is used again\n"));
    let (status, text) = request(&fixture, "POST", undo).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    assert!(text.ends_with("by an operator; nothing is\n"), "{text}");
    let (_, text) = request(&fixture, "GET", "/status").await;
    assert!(text.contains(r#""evacuated":[]"#), "{text}");
}

#[tokio::test]
async fn a_region_in_which_nothing_is_is_refused_with_those_that_there_are() {
    let fixture = fixture();
    for (place, text) in [
        (None, "no workload is there, as no `workloads[].locality` names a region\n"),
        (Some("us-east-2"), "no workload is there; write one of us-east-2\n"),
    ] {
        if let Some(place) = place {
            located(&fixture, &[place]);
        }
        for (method, order) in [("POST", ""), ("GET", ""), ("POST", "&force")] {
            let uri = format!("/drain/region?region=us-esat-2{order}");
            let (status, reported) = request(&fixture, method, &uri).await;
            let want = format!("region us-esat-2 cannot be evacuated: {text}");
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
        let want = "region us-east-2 is not evacuated: no endpoint would be left for app/echo.app; \
                    write --force to refuse their tunnels\n";
        assert_eq!((status, &*text), (StatusCode::CONFLICT, want), "{method}");
    }
    let forced = format!("{uri}&force");
    let (status, text) = request(&fixture, "GET", &forced).await;
    let want = "region us-east-2 would be evacuated: new tunnels avoid it, open ones go on; it \
                ends with --undo or a restart\n1 of 1 workloads are there\nno endpoint would be \
                left, and tunnels are rejected: app/echo.app\nnothing was changed\n";
    assert_eq!((status, &*text), (StatusCode::OK, want));
    assert!(fixture.state.reader.load().balancing.evacuated.is_empty());
    let (status, _) = request(&fixture, "POST", &forced).await;
    assert_eq!(status, StatusCode::OK);
    // It removes no further endpoint.
    let (status, _) = request(&fixture, "POST", uri).await;
    assert_eq!(status, StatusCode::OK);
    let (status, text) = request(&fixture, "GET", &format!("{uri}&undo")).await;
    let want = "region us-east-2 would be used again\nnothing was changed\n";
    assert_eq!((status, &*text), (StatusCode::OK, want));
    assert_eq!(fixture.state.reader.load().balancing.evacuated.len(), 1);
    let (status, text) = request(&fixture, "POST", "/drain/region?region=mars&undo").await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    assert!(text.ends_with("these are: region us-east-2\n"), "{text}");
}

#[tokio::test]
async fn what_is_no_region_or_too_much_is_refused() {
    let fixture = fixture();
    for uri in ["", "?region=", "?region=a//b", "?undo", "?region=*", "?region=r0&dryrun"] {
        let (status, text) = request(&fixture, "POST", &format!("/drain/region{uri}")).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{uri}: {text}");
    }
    let regions: Vec<_> = (0..=EVACUATED_MAX).map(|index| format!("r{index}")).collect();
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
    assert_eq!(fixture.state.reader.load().balancing.evacuated.len(), EVACUATED_MAX);
}

#[tokio::test]
async fn a_cluster_or_an_endpoint_is_evacuated_as_a_region_is() {
    let fixture = fixture();
    located(&fixture, &["us-east-2"]);
    for (kind, name) in
        [("cluster", "east"), ("endpoint", "10.0.0.1"), ("endpoint", "east//Pod/app/echo-1")]
    {
        let path = format!("/drain/{kind}?{kind}={name}");
        let (status, text) = request(&fixture, "POST", &path).await;
        let want = format!("{kind} {name} is not evacuated: no endpoint would be left for app/");
        assert!(status == StatusCode::CONFLICT && text.starts_with(&want), "{text}");
        let (status, text) = request(&fixture, "POST", &format!("{path}&force")).await;
        assert_eq!(status, StatusCode::OK, "{text}");
        let (_, text) = request(&fixture, "GET", "/status?service=echo").await;
        let why = format!("\"unused\":\"{kind} {name} is evacuated (`strait drain {kind}`)\"");
        assert!(text.contains(&why), "{text}");
        let row = format!(r#""drained":[{{"kind":"{kind}","name":"{name}","since":"2"#);
        assert!(text.contains(&row), "{text}");
        let (status, text) = request(&fixture, "POST", &format!("{path}&undo")).await;
        assert_eq!((status, text), (StatusCode::OK, format!("{kind} {name} is used again\n")));
    }
    for (path, want) in [
        ("/drain/cluster?cluster=esat", "; write one of east\n"),
        (
            "/drain/endpoint?endpoint=10.9.9.9",
            "with their uids, and `strait status peers` gateways\n",
        ),
        ("/drain/cluster?region=east", "write ?cluster=CLUSTER\n"),
        (
            "/drain/zone?region=east",
            "with one of region, cluster, endpoint, gateway, service, listener\n",
        ),
    ] {
        let (status, text) = request(&fixture, "POST", path).await;
        assert!(status.is_client_error() && text.ends_with(want), "{path}: {text}");
    }
}
