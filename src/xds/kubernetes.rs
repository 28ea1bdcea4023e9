//! Watches of an API server, one for each kind of objects that files may have.
//!
//! A watch begins with a list in pages. After an error the kind is listed again, with a delay that
//! grows from 0.8 s to 30 s, and its last state stays in use meanwhile.

use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, TypeMeta};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::watcher::{self, DefaultBackoff, Event, watcher};
use kube::{Client, Config};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tokio_stream::StreamExt;
use tracing::{info, warn};

use super::live::{LiveSource, Problem};
use super::objects::KINDS;

/// Number of objects of a page. An object has at most 1.5 MiB.
const PAGE: u32 = 200;

/// Time after which the API server ends a watch, which is then begun again at the same place.
const WATCH_SECONDS: u32 = 60;

/// Time without a byte of an answer after which a connection is given up. The API server sends at
/// least the end of a watch in [`WATCH_SECONDS`].
const SILENCE: Duration = Duration::from_secs(90);

/// Delay before a kind beyond the limits is listed again.
const OVER_DELAY: Duration = Duration::from_secs(60);

/// Watches all kinds, and does not return. Without a kubeconfig the API server is that of the pod.
pub async fn run(kubeconfig: Option<&Path>, live: Arc<LiveSource>) {
    let mut delays = DefaultBackoff::default();
    let client = loop {
        match client(kubeconfig).await {
            Ok(client) => break client,
            Err(error) => {
                let error = describe(&*error);
                for (kind, _) in KINDS {
                    live.failed(kind, Problem::Failed(error.clone()));
                }
                warn!(%error, "cannot use the Kubernetes API");
                sleep(delays.next().unwrap_or(OVER_DELAY)).await;
            }
        }
    };
    let mut watches = JoinSet::new();
    for (kind, versions) in KINDS {
        watches.spawn(watch(client.clone(), kind, versions, Arc::clone(&live)));
    }
    while let Some(ended) = watches.join_next().await {
        if let Err(error) = ended {
            // A panic: the thread ends by it, and readiness shows that.
            std::panic::resume_unwind(error.into_panic());
        }
    }
}

async fn client(kubeconfig: Option<&Path>) -> anyhow::Result<Client> {
    let mut config = match kubeconfig {
        Some(path) => {
            let file = Kubeconfig::read_from(path)?;
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?
        }
        None => Config::incluster()?,
    };
    config.read_timeout = Some(SILENCE);
    Ok(Client::try_from(config)?)
}

/// Watches one kind, in the first of its versions that the API server has.
async fn watch(
    client: Client,
    kind: &'static str,
    versions: &'static [&'static str],
    live: Arc<LiveSource>,
) {
    let mut delays = DefaultBackoff::default();
    loop {
        let mut problem = Problem::Missing;
        let mut wait = None;
        for version in versions {
            let resource = resource(kind, version);
            match watch_version(&client, &resource, &live).await {
                End::Missing if is_built_in(version) => {
                    problem = Problem::Failed("the API server does not have it (404)".to_owned());
                }
                End::Missing => continue,
                End::Gone => wait = delays.next(),
                End::Over => wait = Some(OVER_DELAY),
                End::Failed(why) => problem = Problem::Failed(why),
            }
            break;
        }
        if let Some(wait) = wait {
            sleep(wait).await;
            continue;
        }
        let error = match &problem {
            Problem::Missing => "the API server does not have the kind",
            Problem::Failed(why) => why,
        };
        let error = error.to_owned();
        if live.failed(kind, problem) && live.contents().is_none() {
            warn!(kind, error, "cannot list objects of Kubernetes");
        }
        sleep(delays.next().unwrap_or(OVER_DELAY)).await;
    }
}

/// Returns whether each API server has a version. A 404 then comes from another server.
fn is_built_in(version: &str) -> bool {
    matches!(version, "v1" | "discovery.k8s.io/v1")
}

/// End of a watch.
enum End {
    /// The API server does not have the version.
    Missing,
    /// Changes since the last event are no longer known.
    Gone,
    /// There are more objects than the limits permit.
    Over,
    /// Any other error.
    Failed(String),
}

/// Lists and watches one version of a kind, until that ends.
async fn watch_version(client: &Client, resource: &ApiResource, live: &LiveSource) -> End {
    let kind = &*resource.kind;
    let api = Api::<DynamicObject>::all_with(client.clone(), resource);
    let config = watcher::Config::default().page_size(PAGE).timeout(WATCH_SECONDS);
    let mut events = pin!(watcher(api, config));
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::Init) => live.begin(kind),
            Ok(Event::InitApply(object)) => {
                if !put(live, resource, object, true) {
                    return End::Over;
                }
            }
            Ok(Event::Apply(object)) => {
                if !put(live, resource, object, false) {
                    return End::Over;
                }
            }
            Ok(Event::InitDone) => {
                live.complete(kind);
                info!(kind, version = resource.api_version, "objects of Kubernetes are listed");
            }
            Ok(Event::Delete(object)) => {
                if let Ok(json) = serde_json::to_value(&object) {
                    live.remove(kind, &json);
                }
            }
            Err(error) => return end(&error),
        }
    }
    End::Failed("the watch ended".to_owned())
}

/// Gives an object to the source. Returns false if it was left out.
fn put(
    live: &LiveSource,
    resource: &ApiResource,
    mut object: DynamicObject,
    in_list: bool,
) -> bool {
    // The items of a list have no types.
    object.types =
        Some(TypeMeta { api_version: resource.api_version.clone(), kind: resource.kind.clone() });
    // Serialization of maps of texts does not fail.
    serde_json::to_value(&object).map_or(true, |json| live.put(&resource.kind, json, in_list))
}

fn end(error: &watcher::Error) -> End {
    let status = match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status))
        | watcher::Error::WatchError(status) => Some(status),
        _ => None,
    };
    match status {
        Some(status) if status.code == 404 => End::Missing,
        Some(status) if status.code == 410 => End::Gone,
        Some(status) => End::Failed(format!("{} ({})", status.message, status.code)),
        None => End::Failed(describe(error)),
    }
}

/// Returns the innermost cause of an error, which names what the system or the server reported.
fn describe(error: &(dyn std::error::Error + 'static)) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}

fn resource(kind: &str, version: &str) -> ApiResource {
    let (group, version) = version.split_once('/').unwrap_or(("", version));
    ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind))
}
