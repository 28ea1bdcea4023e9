//! Line of a table: what a client sends, and the results that conform.

use std::pin::Pin;
use std::time::Duration;

use anyhow::{Context, ensure};
use derive_more::Display;
use serde::Serialize;
use tokio::time::timeout;

use super::outcome::{Outcome, State};
use super::peer::{Peer, Target};

/// Deadline of a case. Those of silent peers wait longest, for the gateway's own deadlines.
pub(super) const CASE_DEADLINE: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, Display, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[display(rename_all = "lowercase")]
#[serde(rename_all = "lowercase")]
pub enum Group {
    /// Versions, groups, ALPN and client certificates, by docs/wire-contract.md 1.1.
    Tls,
    /// Frames, states, windows and header fields, by RFC 9113 and RFC 7541.
    Http2,
    /// Bytes, ends, answers and many tunnels in one connection, by docs/wire-contract.md 1.3 to
    /// 1.6.
    Tunnels,
    /// Clients that are silent, break off or never read.
    Faults,
    /// Frames without end, beside another client.
    Floods,
}

pub(super) type Script = Pin<Box<dyn Future<Output = anyhow::Result<()>> + Send>>;

#[derive(Debug)]
pub struct Case {
    pub group: Group,
    /// Section of the RFC, or of docs/wire-contract.md, that requires the result.
    pub section: &'static str,
    /// Description of what the client does, unique in the section.
    pub name: String,
    pub(super) deadline: Duration,
    work: Work,
}

#[derive(derive_more::Debug)]
enum Work {
    #[debug("frames in state {state:?}")]
    Frames { state: State, frames: Vec<u8>, expected: Vec<Outcome> },
    #[debug("script")]
    Script(Box<dyn Fn(Target) -> Script + Send + Sync>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    Passed,
    /// Outcome, and the expected one.
    Failed(String),
    /// Cause for which the case cannot run here.
    Skipped(String),
}

pub(super) fn frames<const N: usize>(parts: [Vec<u8>; N]) -> Vec<u8> {
    parts.concat()
}

/// Returns a case of frames in a state of stream 1.
pub(super) fn case(
    section: &'static str,
    name: &str,
    state: State,
    frames: Vec<u8>,
    expected: impl Into<Vec<Outcome>>,
) -> Case {
    let work = Work::Frames { state, frames, expected: expected.into() };
    let (group, name) = (Group::Http2, name.to_owned());
    Case { group, section, name, deadline: CASE_DEADLINE, work }
}

pub(super) fn script<F>(
    group: Group,
    section: &'static str,
    name: impl Into<String>,
    run: impl Fn(Target) -> F + Send + Sync + 'static,
) -> Case
where
    F: Future<Output = anyhow::Result<()>> + Send + 'static,
{
    let work = Work::Script(Box::new(move |to| Box::pin(run(to))));
    Case { group, section, name: name.into(), deadline: CASE_DEADLINE, work }
}

impl Case {
    /// Runs the case in connections of its own. With `is_strict`, only the outcomes that Strait
    /// promises conform, and not all that the RFCs permit.
    pub async fn run(&self, to: &Target, is_strict: bool) -> Verdict {
        let done = async {
            match &self.work {
                Work::Frames { state, frames, expected } => {
                    send(to, *state, frames, expected, is_strict).await
                }
                Work::Script(run) => run(to.clone()).await.map(|()| Verdict::Passed),
            }
        };
        match timeout(self.deadline, done).await {
            Ok(Ok(verdict)) => verdict,
            Ok(Err(error)) => Verdict::Failed(format!("{error:#}")),
            Err(_) => Verdict::Failed(format!("no result in {:?}", self.deadline)),
        }
    }
}

async fn send(
    to: &Target,
    state: State,
    frames: &[u8],
    expected: &[Outcome],
    is_strict: bool,
) -> anyhow::Result<Verdict> {
    if state.needs_script() && !to.is_scripted {
        let cause = "a plain echo; run `strait load serve --mode scripted`";
        return Ok(Verdict::Skipped(cause.to_owned()));
    }
    let mut peer = match state {
        State::Unconnected => Peer::unconnected(to).await?,
        _ => Peer::connect(to, &[]).await?,
    };
    if let Err(error) = peer.bring(to, state).await {
        if state == State::ResetByGateway {
            let cause = "a malformed request does not end by RST_STREAM";
            return Ok(Verdict::Skipped(format!("{cause}: {}", error.root_cause())));
        }
        return Err(error).with_context(|| format!("before the case, {state:?}"));
    }
    peer.try_write(frames).await;
    let outcome = peer.outcome(expected).await?;
    let conforms = expected.iter().any(|one| match is_strict {
        true => *one == outcome,
        false => one.permits(&outcome),
    });
    let all: Vec<_> = expected.iter().map(ToString::to_string).collect();
    ensure!(conforms, "{outcome}, expected {}", all.join(" or "));
    Ok(Verdict::Passed)
}
