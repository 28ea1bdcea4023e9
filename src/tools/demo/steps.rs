//! Steps of the demo, in order; each prints its figures and checks them.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{anyhow, ensure};
use serde_json::json;
use tokio::time::timeout;

use crate::lifecycle::StopSignals;
use crate::output::Output;

use super::client::{DemoClient, Tally};
use super::report::Report;
use super::world::{DemoEnvironment, ECHO, SMALL, UNEXPOSED};

/// Arguments of `strait demo`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  strait demo\n  strait demo -o json | jq .steps\n  \
                  strait demo --keep       then try the commands that it prints")]
pub struct Args {
    #[command(flatten)]
    output: Output,
    /// Leave everything running after the last step, until Ctrl-C.
    #[arg(long)]
    keep: bool,
    /// Number of the two endpoints that are killed midway; with 2 the demo has to fail.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        value_parser = clap::value_parser!(u8).range(0..=2)
    )]
    kill: u8,
}

/// Number of requests whose distribution is compared with the weights.
const SHARE_REQUESTS: usize = 400;
/// Number of requests before the kill, and after it.
const KILL_REQUESTS: usize = 100;
/// Number of requests of all steps; each is one tunnel.
const REQUESTS: usize = SHARE_REQUESTS + 2 * KILL_REQUESTS;
/// Limit of the deviation of an endpoint's share from its weight: five standard deviations of a
/// binomial share, 5 × √(0.25 × 0.75 / 400).
const SHARE_TOLERANCE: f64 = 0.11;
/// Limit of the demo's duration; `make demo` promises a minute.
const DEADLINE: Duration = Duration::from_secs(55);

pub fn run(args: &Args) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        // Without handlers, a signal would leave the gateway's process and the folder behind.
        let mut stop = StopSignals::new()?;
        let mut report = Report::new(args.output.is_json());
        let mut world = None;
        let shown = tokio::select! {
            shown = timeout(DEADLINE, run_steps(args, &mut report, &mut world)) => {
                shown.unwrap_or_else(|_| Err(anyhow!("not done within 55 s")))
            }
            _ = stop.next() => Err(anyhow!("stopped by a signal")),
        };
        let shown = shown.map_err(|error| report.name_step(error));
        report.end(shown.as_ref().err());
        if let Some(world) = world {
            if args.keep && !stop.was_signalled {
                report.print_hints(&world);
                stop.next().await;
            }
            world.stop().await;
        }
        shown
    })
}

async fn run_steps(
    args: &Args,
    report: &mut Report,
    running: &mut Option<DemoEnvironment>,
) -> anyhow::Result<()> {
    report.begin("start", "certificates, two endpoints in cluster east, and the gateway");
    let world = running.insert(DemoEnvironment::start().await?);
    report.done(
        json!({"gateway": world.gateway, "folder": world.folder()}),
        &format!(
            "gateway {} is ready; two endpoints of weights 1 and 3 serve {ECHO}",
            world.gateway
        ),
    );

    let caller = Arc::new(DemoClient::new(world, "client").await?);
    check_weights(&caller, world, report).await?;
    check_killed_endpoint(args, &caller, world, report).await?;
    check_untrusted_peer(world, report).await?;
    check_unexposed_service(&caller, report).await?;
    check_counters(world, report).await
}

fn is_zero(value: f64) -> bool {
    value == 0.0
}

async fn check_weights(
    caller: &Arc<DemoClient>,
    world: &mut DemoEnvironment,
    report: &mut Report,
) -> anyhow::Result<()> {
    report.begin("requests", "double HBONE from cluster west, answered end to end");
    let tally = caller.requests(SHARE_REQUESTS, |done| report.progress(done, SHARE_REQUESTS)).await;
    let share = tally.share(SMALL);
    report.done(
        json!({"answered": tally.answered(), "failed": tally.failed,
               "by_endpoint": tally.by_endpoint, "share_of_weight_1": share}),
        &format!(
            "{} of {SHARE_REQUESTS} answered; weight 1 of 4 had {:.0} %, weight 3 had {:.0} %",
            tally.answered(),
            share * 100.0,
            (1.0 - share) * 100.0
        ),
    );
    ensure!(tally.failed == 0, "{} requests failed, the last: {}", tally.failed, tally.last_error);
    ensure!((share - 0.25).abs() < SHARE_TOLERANCE, "weight 1 of 4 had a share of {share:.2}");
    ensure!(!world.has_exited(), "the gateway has exited");
    Ok(())
}

async fn check_killed_endpoint(
    args: &Args,
    caller: &Arc<DemoClient>,
    world: &mut DemoEnvironment,
    report: &mut Report,
) -> anyhow::Result<()> {
    report.begin("kill", "an endpoint is killed in the middle");
    let before = caller.requests(KILL_REQUESTS, |_| {}).await;
    // Tunnels that are still closing would count as broken if their endpoint is killed now.
    world.wait_for_metric("strait_tunnels_open", is_zero).await?;
    let killed = world.kill(args.kill.into()).await;
    let after = caller.requests(KILL_REQUESTS, |done| report.progress(done, KILL_REQUESTS)).await;
    report.done(
        json!({"killed": killed, "answered_before": before.answered(),
               "failed_before": before.failed, "by_endpoint_before": before.by_endpoint,
               "answered_after": after.answered(), "failed_after": after.failed,
               "by_endpoint_after": after.by_endpoint}),
        &format!(
            "killed {}; of {KILL_REQUESTS} requests begun after it {} were answered, \
             without a retry by the client",
            killed.join(" and "),
            after.answered()
        ),
    );
    let Tally { failed, last_error, .. } = after;
    ensure!(before.failed == 0, "{} requests failed before the kill", before.failed);
    ensure!(failed == 0, "{failed} requests failed after the kill, the last: {last_error}");
    Ok(())
}

async fn check_untrusted_peer(world: &DemoEnvironment, report: &mut Report) -> anyhow::Result<()> {
    report.begin("stranger", "a peer of an unknown trust domain, under the same root");
    let refused = match DemoClient::new(world, "stranger").await {
        Ok(caller) => caller.request().await.err(),
        Err(error) => Some(error),
    };
    let counted = world
        .wait_for_metric("strait_handshakes_refused_total{reason=\"untrusted_domain\"}", |count| {
            count >= 1.0
        })
        .await?;
    let error = refused.as_ref().map(|error| format!("{error:#}")).unwrap_or_default();
    report.done(
        json!({"refused": refused.is_some(), "error": error, "counted": counted}),
        &format!("refused in the handshake, and counted: untrusted_domain {counted}"),
    );
    ensure!(refused.is_some(), "a peer of an unknown trust domain was admitted");
    ensure!(counted >= 1.0, "the refusal was not counted");
    Ok(())
}

async fn check_unexposed_service(caller: &DemoClient, report: &mut Report) -> anyhow::Result<()> {
    report.begin("unexposed", "a service of the mesh that is not exposed");
    let status = caller.connect_status(UNEXPOSED).await?;
    let unknown = caller.connect_status("no-such-service.app.svc.cluster.local:80").await?;
    report.done(
        json!({"status": status.as_u16(), "status_of_unknown": unknown.as_u16()}),
        &format!("{UNEXPOSED} is refused with {status}, as is a service that does not exist"),
    );
    ensure!(status == http::StatusCode::SERVICE_UNAVAILABLE, "{UNEXPOSED} was answered {status}");
    ensure!(status == unknown, "the status reveals that {UNEXPOSED} exists");
    Ok(())
}

async fn check_counters(world: &DemoEnvironment, report: &mut Report) -> anyhow::Result<()> {
    report.begin("look", "where to look");
    let open = world.wait_for_metric("strait_tunnels_open", is_zero).await?;
    let tunnels =
        world.metric("strait_tunnels_total{reason=\"completed\",source_cluster=\"west\"}").await?;
    let lines = world.wait_for_completed_lines(REQUESTS).await?;
    report.done(
        json!({"metrics": world.metrics_url(), "dump": world.dump_url(), "log": world.log_file(),
               "tunnels_completed": tunnels, "log_lines": lines, "admin": world.admin_url()}),
        &format!(
            "metrics {} ({tunnels} tunnels completed), log {} ({lines} lines for them), state {}",
            world.metrics_url(),
            world.log_file().display(),
            world.dump_url()
        ),
    );
    ensure!(open == 0.0, "{open} tunnels of the demo are still open");
    ensure!(
        u32::try_from(REQUESTS).is_ok_and(|requests| tunnels == f64::from(requests)),
        "the gateway counted {tunnels} completed tunnels of {REQUESTS}"
    );
    ensure!(
        lines == REQUESTS,
        "the access log has {lines} lines of completed tunnels, not {REQUESTS}"
    );
    Ok(())
}
