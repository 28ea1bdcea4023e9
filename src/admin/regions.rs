//! POST `/drain/region`: an operator takes a region out of the running gateway, and puts it back.

use std::collections::BTreeSet;

use axum::extract::{Query, State};
use axum::http::StatusCode;
use serde::Deserialize;

use super::AdminState;
use super::view::key_of;
use crate::snapshot::builder::Change;
use crate::snapshot::traffic::Override;
use crate::snapshot::{Locality, Snapshot, Unused};
use crate::wire::RegionPattern;

/// Regions that can be evacuated at once. Each workload is compared with all of them.
const EVACUATED_MAX: usize = 64;

/// Services and regions that are named in an answer.
const NAMED: usize = 5;

/// `?region=REGION`, and `?undo`, which needs no value.
#[derive(Debug, Deserialize)]
pub(super) struct Parameters {
    region: Option<String>,
    undo: Option<String>,
}

/// Evacuates a region or takes that back, and says what came of it.
pub(super) async fn drain(
    State(state): State<AdminState>,
    Query(parameters): Query<Parameters>,
) -> (StatusCode, String) {
    let region = parameters.region.as_deref().and_then(RegionPattern::parse);
    let Some(region) = region else {
        let text = "write ?region=REGION, a region, REGION/ZONE or REGION/ZONE/SUBZONE\n";
        return (StatusCode::BAD_REQUEST, text.to_owned());
    };
    if region.depth() == 0 {
        let text = "that would leave nothing; to stop this gateway write /quitquitquit\n";
        return (StatusCode::BAD_REQUEST, text.to_owned());
    }
    let undo = parameters.undo.is_some();
    // All services are looked at anew: a large mesh takes its time.
    let done = tokio::task::spawn_blocking(move || match undo {
        true => put_back(&state, region),
        false => evacuate(&state, region),
    });
    done.await
        .unwrap_or_else(|_| (StatusCode::INTERNAL_SERVER_ERROR, String::new()))
}

fn evacuate(state: &AdminState, region: RegionPattern) -> (StatusCode, String) {
    let before = state.reader.snapshot();
    let evacuated = &before.balancing.evacuated;
    if evacuated.len() >= EVACUATED_MAX && !evacuated.contains(&region) {
        let text = format!("{EVACUATED_MAX} regions are evacuated already; undo one of them\n");
        return (StatusCode::CONFLICT, text);
    }
    tracing::info!(%region, "evacuated by /drain/region");
    order(state, Override::Evacuate(region.clone()));
    let snapshot = state.reader.snapshot();
    let workloads = snapshot.mesh.workloads.values();
    let locality = |one: &Locality| region.matches(&one.region, &one.zone, &one.subzone);
    let there = workloads.filter(|one| locality(&one.locality)).count();
    let mut text = format!(
        "{region} is evacuated: new tunnels avoid it, open ones go on; it ends with --undo or a \
         restart\n{there} of {} workloads are there{}\n",
        snapshot.mesh.workloads.len(),
        match there {
            0 => elsewhere(&snapshot),
            _ => String::new(),
        }
    );
    let lost = without_endpoints(&snapshot);
    if !lost.is_empty() {
        let (count, named) = (lost.len(), lost.into_iter().take(NAMED));
        let named: Vec<_> = named.collect();
        let more = match count - named.len() {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        text += &format!(
            "no endpoint is left by all evacuations, and tunnels are refused: {}{more}\n",
            named.join(", ")
        );
    }
    (StatusCode::OK, text)
}

/// The regions in which workloads are, for whoever named one in which none is.
fn elsewhere(snapshot: &Snapshot) -> String {
    let workloads = snapshot.mesh.workloads.values();
    let regions = workloads.map(|one| &*one.locality.region);
    let regions: BTreeSet<_> = regions.filter(|region| !region.is_empty()).collect();
    let named: Vec<_> = regions.iter().take(NAMED).copied().collect();
    match regions.len() {
        0 => "; the mesh names no region".to_owned(),
        count if count > NAMED => format!("; they are in {} and others", named.join(", ")),
        _ => format!("; they are in {}", named.join(", ")),
    }
}

fn put_back(state: &AdminState, region: RegionPattern) -> (StatusCode, String) {
    let before = state.reader.snapshot();
    let evacuated = &before.balancing.evacuated;
    if !evacuated.contains(&region) {
        let named: Vec<_> = evacuated.iter().map(ToString::to_string).collect();
        let others = match named.is_empty() {
            true => "no region is".to_owned(),
            false => format!("these are: {}", named.join(", ")),
        };
        let text = format!("{region} was not evacuated by an operator; {others}\n");
        return (StatusCode::NOT_FOUND, text);
    }
    tracing::info!(%region, "put back by /drain/region");
    order(state, Override::Return(region.clone()));
    (StatusCode::OK, format!("{region} is used again\n"))
}

fn order(state: &AdminState, order: Override) {
    state.publisher.update(Change {
        overrides: Some(order),
        ..Change::default()
    });
}

/// The services of which evacuations have left no endpoint on some port, `namespace/hostname`.
fn without_endpoints(snapshot: &Snapshot) -> BTreeSet<String> {
    let services = snapshot.services.values();
    let lost = services.filter(|service| {
        let mut sets = service.ports.values();
        sets.any(|set| {
            let mut left_out = set.left_out().iter();
            set.endpoints.is_empty() && left_out.any(|why| matches!(why, Unused::Evacuated(_)))
        })
    });
    lost.map(|service| key_of(&service.definition)).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::admin_router;
    use super::super::tests::{Fixture, ask, fixture, mesh};
    use super::*;

    /// The workload of the usual mesh in a region, and another service without any.
    fn located(fixture: &Fixture, region: &str) {
        let mut mesh = mesh();
        let mut workload = mesh.workloads.sorted()[0].as_ref().clone();
        workload.locality = Arc::new(Locality {
            region: region.into(),
            ..Locality::default()
        });
        let uid = Arc::clone(&workload.uid);
        mesh.workloads.insert(uid, Arc::new(workload));
        fixture.publisher.update(Change {
            mesh: Some((mesh, "east".into())),
            ..Change::default()
        });
    }

    async fn asked(fixture: &Fixture, method: &str, uri: &str) -> (StatusCode, String) {
        ask(admin_router(fixture.state.clone()), method, uri).await
    }

    #[tokio::test]
    async fn a_region_is_evacuated_shown_and_put_back() {
        let fixture = fixture();
        located(&fixture, "us-east-2");
        let (status, text) = asked(&fixture, "POST", "/drain/region?region=us-east-2/*").await;
        let want = "us-east-2 is evacuated: new tunnels avoid it, open ones go on; it ends with \
                    --undo or a restart\n1 of 1 workloads are there\nno endpoint is left by all \
                    evacuations, and tunnels are refused: app/echo.app\n";
        assert_eq!((status, &*text), (StatusCode::OK, want));
        let (_, text) = asked(&fixture, "GET", "/status").await;
        assert!(text.contains("\n  us-east-2 is evacuated; "), "{text}");
        let (_, text) = asked(&fixture, "GET", "/status?service=echo").await;
        let why = "not used: region us-east-2 is evacuated (`strait drain region`)";
        assert!(text.contains(why), "{text}");
        let (_, dump) = asked(&fixture, "GET", "/config_dump").await;
        let dump: serde_json::Value = serde_json::from_str(&dump).expect("JSON");
        assert_eq!(
            dump["strait"]["evacuated"],
            serde_json::json!(["us-east-2"])
        );
        let undo = "/drain/region?region=us-east-2&undo";
        let (status, text) = asked(&fixture, "POST", undo).await;
        assert_eq!(
            (status, &*text),
            (StatusCode::OK, "us-east-2 is used again\n")
        );
        let (status, text) = asked(&fixture, "POST", undo).await;
        assert_eq!(status, StatusCode::NOT_FOUND);
        assert!(text.ends_with("by an operator; no region is\n"), "{text}");
        let (_, text) = asked(&fixture, "GET", "/status").await;
        assert!(!text.contains("evacuated"), "{text}");
    }

    #[tokio::test]
    async fn a_region_in_which_nothing_is_is_told_with_those_that_there_are() {
        let fixture = fixture();
        let (_, text) = asked(&fixture, "POST", "/drain/region?region=mars").await;
        assert!(
            text.contains("workloads are there; the mesh names no region\n"),
            "{text}"
        );
        located(&fixture, "us-east-2");
        let (_, text) = asked(&fixture, "POST", "/drain/region?region=mars").await;
        let want = "0 of 1 workloads are there; they are in us-east-2\n";
        assert!(text.contains(want), "{text}");
    }

    #[tokio::test]
    async fn what_is_no_region_or_too_much_is_refused() {
        let fixture = fixture();
        for uri in ["", "?region=", "?region=a//b", "?undo", "?region=*"] {
            let (status, text) = asked(&fixture, "POST", &format!("/drain/region{uri}")).await;
            assert_eq!(status, StatusCode::BAD_REQUEST, "{uri}: {text}");
        }
        for index in 0..=EVACUATED_MAX {
            let uri = format!("/drain/region?region=r{index}");
            let (status, text) = asked(&fixture, "POST", &uri).await;
            let fits = index < EVACUATED_MAX;
            assert_eq!(status == StatusCode::OK, fits, "{index}: {text}");
        }
        // One that is evacuated already is no further one.
        let (status, _) = asked(&fixture, "POST", "/drain/region?region=r0").await;
        assert_eq!(status, StatusCode::OK);
        assert_eq!(
            fixture.state.reader.load().balancing.evacuated.len(),
            EVACUATED_MAX
        );
    }
}
