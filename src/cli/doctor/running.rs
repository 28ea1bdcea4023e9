//! Checks of a gateway that runs, by its admin port.

use std::net::SocketAddr;
use std::time::Duration;

use http::Method;
use serde::de::IgnoredAny;
use tokio::time::timeout;

use super::super::ask::Admin;
use super::finding::{Finding, Outcome};
use crate::admin::pages::StatusPage;

const RUNNING: &str = "running gateway";
const PLANE: &str = "control plane";

/// Deadline for the whole status page.
const DEADLINE: Duration = Duration::from_secs(6);

/// Asks the gateway with this admin port, if one runs, for its state.
pub(super) async fn gateway(admin: SocketAddr) -> Vec<Finding> {
    let admin = Admin::at(admin);
    let asking = async {
        let answer = admin.request(Method::GET, "/status", &()).await.ok()?;
        Some(answer.decode::<StatusPage<IgnoredAny>>().await)
    };
    match timeout(DEADLINE, asking).await {
        Ok(Some(Ok(page))) => of_page(&page),
        Ok(Some(Err(error))) => {
            vec![Finding::of_message(RUNNING, Outcome::Warning, &error.to_string())]
        }
        Ok(None) => vec![Finding::ok(RUNNING, "none answers on the admin port")],
        Err(_) => {
            let found = "the admin port does not answer in time";
            vec![Finding::failure(RUNNING, found, "look at its log, and restart it")]
        }
    }
}

fn of_page(page: &StatusPage<IgnoredAny>) -> Vec<Finding> {
    let mut findings = Vec::new();
    if page.ready {
        let found = format!("version {} is ready", page.version);
        findings.push(Finding::ok(RUNNING, found));
    } else {
        let found = format!("version {} waits for {}", page.version, page.pending.join(", "));
        findings.push(Finding::failure(RUNNING, found, "see `strait status`"));
    }
    let own = env!("CARGO_PKG_VERSION");
    if page.version != own {
        let found = format!("version {} runs, and this is {own}", page.version);
        findings.push(Finding::warning(RUNNING, found, "restart the gateway after an upgrade"));
    }
    for problem in &page.problems {
        let mut finding = Finding::of_message(RUNNING, Outcome::Warning, problem);
        finding.remedy.get_or_insert_with(|| "see `strait status`".to_owned());
        findings.push(finding);
    }
    for gateway in page.gateways.iter().filter(|gateway| !gateway.error.is_empty()) {
        let found = format!("gateway {}: {}", gateway.address, gateway.error);
        findings.push(Finding::warning(RUNNING, found, "see `strait status peers`"));
    }
    let Some(stream) = &page.source.stream else { return findings };
    let lacking = stream.types.iter().filter(|kind| !kind.synced || kind.accepted.is_none());
    let lacking: Vec<_> = lacking.map(|kind| &*kind.name).collect();
    let version = stream.types.iter().map(|kind| &*kind.version).find(|text| !text.is_empty());
    let version = version.map_or_else(String::new, |version| format!(" (version {version})"));
    findings.push(if lacking.is_empty() {
        Finding::ok(PLANE, format!("{}{version} has sent all types", stream.address))
    } else {
        let found = format!("{}{version} has not sent {}", stream.address, lacking.join(", "));
        Finding::failure(PLANE, found, "grant the gateway these types there, and see its log")
    });
    findings
}
