//! Readiness condition for the endpoints that the clusters of an Envoy control plane refer to.

use std::time::Duration;

use tokio::time::Instant;

use super::client::Client;
use super::envoy::ENDPOINT;
use super::sleep_until_some;

/// Longest time that readiness waits for answers after all wildcard types are complete.
const INITIAL_ENDPOINTS_TIMEOUT: Duration = Duration::from_secs(5);

/// Tracks whether each endpoint of the first subscription was received or does not exist. Under
/// Istio no endpoints are subscribed to.
#[derive(Debug, Default)]
pub(super) struct InitialEndpoints {
    deadline: Option<Instant>,
    settled: bool,
}

impl InitialEndpoints {
    /// Waits until the deadline for answers. Never completes if no answers are awaited.
    pub(super) async fn wait_deadline(&self) {
        sleep_until_some(self.deadline.filter(|_| !self.settled)).await
    }

    /// Returns whether each name was answered or the deadline has passed.
    pub(super) fn are_complete(&mut self, client: &Client) -> bool {
        if !self.settled && client.is_synced() {
            let now = Instant::now();
            let deadline = *self.deadline.get_or_insert(now + INITIAL_ENDPOINTS_TIMEOUT);
            self.settled = client.unanswered(ENDPOINT) == 0 || deadline <= now;
        }
        self.settled
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::xds::cache::Recorder;
    use crate::xds::client::{Mode, Response, Subscription};
    use crate::xds::store::Store;

    #[tokio::test(start_paused = true)]
    async fn readiness_waits_for_answers_and_not_for_ever() {
        for answered in [true, false] {
            let mut answers = InitialEndpoints::default();
            let endpoints = Subscription { type_url: ENDPOINT, mode: Mode::OnDemand };
            let (mut client, mut store) =
                (Client::new(vec![endpoints]), Recorder::new(Box::<Store>::default()));
            client.connected();
            let names = ["gone".to_owned()].into();
            client.set_wanted(ENDPOINT, &names, &mut store);
            assert!(!answers.are_complete(&client));
            let began = Instant::now();
            if answered {
                let response = Response {
                    type_url: ENDPOINT.to_owned(),
                    removed: names.into_iter().collect(),
                    ..Response::default()
                };
                client.received(response, &mut store);
            } else {
                answers.wait_deadline().await;
            }
            assert!(answers.are_complete(&client));
            let waited = Instant::now() - began;
            assert_eq!(waited >= INITIAL_ENDPOINTS_TIMEOUT, !answered, "{waited:?}");
        }
    }
}
