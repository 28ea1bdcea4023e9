//! Client in cluster west: an outer connection to the gateway, and for each request an inner
//! connection through a tunnel, as a ztunnel opens for each connection of its application.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context, anyhow};
use http::StatusCode;
use rustls::ClientConfig;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;

use crate::tls;
use crate::tools::hbone::{Client, ConnectError};

use super::world::{DemoEnvironment, ECHO, ENDPOINT_ID, GATEWAY_ID, identity};

/// Number of concurrent requests. A single one would not show the weights: while the previous
/// tunnel closes, the other endpoint has less load.
const CONCURRENT_REQUESTS: usize = 8;

/// Client with one identity, connected to the gateway.
pub(super) struct DemoClient {
    outer: Client,
    inner_tls: Arc<ClientConfig>,
}

/// Outcome of a series of requests.
#[derive(Default)]
pub(super) struct Tally {
    pub(super) by_endpoint: BTreeMap<String, usize>,
    pub(super) failed: usize,
    pub(super) last_error: String,
}

impl Tally {
    pub(super) fn answered(&self) -> usize {
        self.by_endpoint.values().sum()
    }

    pub(super) fn share(&self, endpoint: &str) -> f64 {
        let count = |of: usize| u32::try_from(of).unwrap_or(u32::MAX);
        let part = self.by_endpoint.get(endpoint).copied().unwrap_or(0);
        f64::from(count(part)) / f64::from(count(self.answered().max(1)))
    }
}

impl DemoClient {
    /// Connects with the certificate of this name in the folder of the demo.
    pub(super) async fn new(world: &DemoEnvironment, name: &str) -> anyhow::Result<Self> {
        let material = identity(world.folder(), name)?;
        let outer_tls = tls::client_config(&material, &[GATEWAY_ID])?;
        let inner_tls = tls::client_config(&material, &[ENDPOINT_ID])?;
        let outer = Client::connect(world.gateway, &outer_tls).await?;
        Ok(Self { outer, inner_tls })
    }

    /// Sends `count` requests, at most [`CONCURRENT_REQUESTS`] concurrently, without retries.
    pub(super) async fn requests(
        self: &Arc<Self>,
        count: usize,
        progress: impl Fn(usize),
    ) -> Tally {
        let mut tally = Tally::default();
        let mut running = JoinSet::new();
        let mut begun = 0;
        loop {
            while begun < count && running.len() < CONCURRENT_REQUESTS {
                let caller = Arc::clone(self);
                running.spawn(async move { caller.request().await });
                begun += 1;
            }
            let Some(ended) = running.join_next().await else {
                return tally;
            };
            match ended.unwrap_or_else(|stopped| Err(stopped.into())) {
                Ok(endpoint) => *tally.by_endpoint.entry(endpoint).or_default() += 1,
                Err(error) => {
                    tally.failed += 1;
                    tally.last_error = format!("{error:#}");
                }
            }
            progress(begun - running.len());
        }
    }

    /// Sends one request by double HBONE, and returns the name of the endpoint that answered.
    pub(super) async fn request(&self) -> anyhow::Result<String> {
        let tunnel = self.outer.tunnel(ECHO).await.context("outer tunnel")?;
        let inner =
            Client::connect_over(tunnel, &self.inner_tls).await.context("inner connection")?;
        let mut stream = inner.tunnel(ECHO).await.context("inner tunnel")?;
        let question = format!("{:016x}", fastrand::u64(..));
        stream.write_all(question.as_bytes()).await?;
        stream.shutdown().await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.context("answer")?;
        drop(stream);
        inner.close().await.context("closing the inner connection")?;
        match answer.split_once(' ') {
            Some((endpoint, echo)) if echo == question => Ok(endpoint.to_owned()),
            _ => Err(anyhow!("asked {question:?}, answered {answer:?}")),
        }
    }

    /// Returns the gateway's status for a CONNECT to `authority`.
    pub(super) async fn connect_status(&self, authority: &str) -> anyhow::Result<StatusCode> {
        match self.outer.tunnel(authority).await {
            Ok(_) => Ok(StatusCode::OK),
            Err(ConnectError::Status(status)) => Ok(status),
            Err(error) => Err(error.into()),
        }
    }
}
