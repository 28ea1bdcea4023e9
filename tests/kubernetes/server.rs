//! Stub of a Kubernetes API server: lists in pages, watches with bookmarks, patches of statuses,
//! and its faults.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use parking_lot::Mutex;
use serde_json::{Value as Json, json};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot, watch};

/// Paths of the kinds.
const PATHS: [(&str, &str); 11] = [
    ("Namespace", "/api/v1/namespaces"),
    ("Node", "/api/v1/nodes"),
    ("Pod", "/api/v1/pods"),
    ("Service", "/api/v1/services"),
    ("EndpointSlice", "/apis/discovery.k8s.io/v1/endpointslices"),
    ("ServiceExport", "/apis/multicluster.x-k8s.io/v1alpha1/serviceexports"),
    ("ServiceImport", "/apis/multicluster.x-k8s.io/v1beta1/serviceimports"),
    ("ServiceExpositionPolicy", "/apis/multicluster.istio.io/v1alpha1/serviceexpositionpolicies"),
    ("RemoteServiceBinding", "/apis/multicluster.istio.io/v1alpha1/remoteservicebindings"),
    ("GlobalTrafficPolicy", "/apis/admiral.io/v1alpha1/globaltrafficpolicies"),
    ("Dependency", "/apis/admiral.io/v1alpha1/dependencies"),
];

/// Objects of a page, whatever the client asks for.
const PAGE: usize = 300;

/// Lines of a watch that no client has read yet.
const LINES: usize = 4096;

/// Cluster of one API server. It outlives the server's process.
#[derive(Clone)]
pub struct Cluster(Arc<World>);

struct World {
    state: Mutex<Objects>,
    changed: watch::Sender<u64>,
}

#[derive(Default)]
struct Objects {
    /// Version of the newest change.
    version: u64,
    /// Oldest version from which a watch may begin.
    oldest: u64,
    /// Number of times that all watches were ended.
    ends: u64,
    /// Objects by kind and name.
    objects: BTreeMap<(&'static str, String), Json>,
    /// Version, kind and event of each change.
    log: Vec<(u64, &'static str, Json)>,
    /// Kinds that the server does not have.
    missing: Vec<&'static str>,
    /// Conditions that the gateway has written, by the path of the object.
    conditions: BTreeMap<String, Json>,
    is_slow: bool,
    lists: usize,
}

/// Running server. It ends on drop, with all its connections.
pub struct Server {
    pub address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Cluster {
    pub fn new() -> Self {
        let state = Objects { version: 1, oldest: 1, ..Objects::default() };
        Self(Arc::new(World { state: Mutex::new(state), changed: watch::Sender::new(0) }))
    }

    fn change(&self, change: impl FnOnce(&mut Objects)) {
        change(&mut self.0.state.lock());
        self.0.changed.send_modify(|count| *count += 1);
    }

    /// Creates or changes an object by its name, or NAMESPACE/NAME in another namespace than `app`.
    /// `parts` are those beside its metadata.
    pub fn put(&self, kind: &str, name: &str, parts: Json) {
        self.change(|state| {
            state.version += 1;
            let mut object = parts;
            let labels = object.get("labels").cloned().unwrap_or_else(|| json!({}));
            let version = state.version.to_string();
            let (namespace, own) = name.split_once('/').unwrap_or(("app", name));
            let mut metadata = json!({
                "name": own, "labels": labels, "resourceVersion": version,
                "creationTimestamp": "2026-01-31T12:00:00Z",
                "managedFields": [{"manager": "test"}],
            });
            if !["Namespace", "Node"].contains(&kind) {
                metadata["namespace"] = json!(namespace);
            }
            object["metadata"] = metadata;
            object.as_object_mut().expect("a map").remove("labels");
            let kind = path_of(kind).0;
            let old = state.objects.insert((kind, name.to_owned()), object.clone());
            let event = if old.is_some() { "MODIFIED" } else { "ADDED" };
            state.log.push((state.version, kind, json!({"type": event, "object": object})));
        });
    }

    /// Removes an object.
    pub fn remove(&self, kind: &str, name: &str) {
        self.change(|state| {
            state.version += 1;
            let kind = path_of(kind).0;
            let mut object = state.objects.remove(&(kind, name.to_owned())).expect("an object");
            object["metadata"]["resourceVersion"] = json!(state.version.to_string());
            state.log.push((state.version, kind, json!({"type": "DELETED", "object": object})));
        });
    }

    /// Ends all watches, and forgets all changes so far, together with a change.
    pub fn forget(&self, change: impl FnOnce(&Self)) {
        self.0.state.lock().is_slow = true;
        self.change(|state| state.ends += 1);
        change(self);
        self.change(|state| {
            state.version += 1;
            state.oldest = state.version;
            state.is_slow = false;
        });
    }

    /// Answers nothing from now on, or again.
    pub fn set_slow(&self, is_slow: bool) {
        self.change(|state| state.is_slow = is_slow);
    }

    /// Has no such kind from now on, or again.
    pub fn set_missing(&self, kinds: &[&'static str]) {
        self.change(|state| state.missing = kinds.to_vec());
    }

    /// Returns the condition of an object, if it has one: its status, reason and message.
    pub fn condition(&self, kind: &str, name: &str) -> Option<(String, String, String)> {
        let plural = path_of(kind).1.rsplit('/').next().expect("a plural");
        let path = format!("/namespaces/app/{plural}/{name}/status");
        let state = self.0.state.lock();
        let (_, patch) = state.conditions.iter().find(|(of, _)| of.ends_with(&path))?;
        let condition = &patch["status"]["conditions"][0];
        assert_eq!(condition["type"], "Accepted");
        let text = |key: &str| condition[key].as_str().expect("a text").to_owned();
        Some((text("status"), text("reason"), text("message")))
    }

    /// Returns the number of lists so far.
    pub fn lists(&self) -> usize {
        self.0.state.lock().lists
    }
}

impl Server {
    /// Serves a cluster at an address.
    pub async fn start(cluster: &Cluster, address: SocketAddr) -> Self {
        let (stop, stopped) = oneshot::channel();
        let (bound, is_bound) = oneshot::channel();
        let router = Router::new().fallback(answer).with_state(cluster.clone());
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(async {
                let listener = TcpListener::bind(address).await.expect("a listener");
                bound.send(listener.local_addr().expect("an address")).expect("a test");
                let serving = tokio::spawn(async move { axum::serve(listener, router).await });
                let _ = stopped.await;
                serving.abort();
            });
        });
        let address = is_bound.await.expect("an address");
        Self { address, stop: Some(stop), thread: Some(thread) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn path_of(kind: &str) -> (&'static str, &'static str) {
    *PATHS.iter().find(|(name, _)| *name == kind).expect("a kind")
}

fn failure(code: u16, message: &str) -> Json {
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": "Expired", "code": code,
    })
}

async fn answer(State(cluster): State<Cluster>, method: Method, uri: Uri, body: Bytes) -> Response {
    let query: HashMap<String, String> =
        serde_urlencoded::from_str(uri.query().unwrap_or_default()).expect("a query");
    let world = cluster.0;
    let mut changed = world.changed.subscribe();
    while world.state.lock().is_slow {
        changed.changed().await.expect("a cluster");
    }
    if method == Method::PATCH && uri.path().ends_with("/status") {
        let patch: Json = serde_json::from_slice(&body).expect("JSON");
        let answer = json!({"metadata": patch["metadata"]}).to_string();
        world.state.lock().conditions.insert(uri.path().to_owned(), patch);
        return answer.into_response();
    }
    let kind = PATHS.iter().find(|(_, path)| *path == uri.path()).map(|(kind, _)| *kind);
    let kind = kind.filter(|kind| !world.state.lock().missing.contains(kind));
    let Some(kind) = kind.filter(|_| method == Method::GET) else {
        let body = failure(404, "the server could not find the requested resource");
        return (StatusCode::NOT_FOUND, body.to_string()).into_response();
    };
    if query.get("watch").is_some_and(|watch| watch == "true") {
        let from = query.get("resourceVersion").and_then(|version| version.parse().ok());
        return watch_kind(&world, kind, from.expect("a version")).into_response();
    }
    list(&world, kind, query.get("continue").map_or("", String::as_str)).to_string().into_response()
}

/// Returns a page that begins after a name.
fn list(world: &World, kind: &'static str, after: &str) -> Json {
    let mut state = world.state.lock();
    state.lists += 1;
    let of_kind = state.objects.iter().filter(|((of, name), _)| *of == kind && &**name > after);
    let mut items: Vec<_> = of_kind.take(PAGE + 1).map(|(_, object)| object.clone()).collect();
    let mut metadata = json!({"resourceVersion": state.version.to_string()});
    if items.len() > PAGE {
        items.truncate(PAGE);
        metadata["continue"] = items[PAGE - 1]["metadata"]["name"].clone();
    }
    json!({"kind": "List", "apiVersion": "v1", "metadata": metadata, "items": items})
}

/// Lines of a watch.
struct Lines(mpsc::Receiver<String>);

impl tokio_stream::Stream for Lines {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(context).map(|line| line.map(|line| Ok(Bytes::from(line + "\n"))))
    }
}

/// Returns the line of an event, with its type first, as an API server writes it.
fn line(event: &Json) -> String {
    format!("{{\"type\": {}, \"object\": {}}}", event["type"], event["object"])
}

fn watch_kind(world: &Arc<World>, kind: &'static str, from: u64) -> Body {
    let (lines, body) = mpsc::channel(LINES);
    let world = Arc::clone(world);
    tokio::spawn(async move {
        let mut changed = world.changed.subscribe();
        let (mut seen, ends) = (from, world.state.lock().ends);
        let bookmark = json!({"type": "BOOKMARK", "object": {
            "kind": kind, "apiVersion": "v1", "metadata": {"resourceVersion": from.to_string()},
        }});
        let _ = lines.try_send(bookmark.to_string());
        loop {
            {
                let state = world.state.lock();
                if state.ends != ends {
                    return;
                }
                if seen < state.oldest {
                    let gone = failure(410, "too old resource version");
                    let _ = lines.try_send(json!({"type": "ERROR", "object": gone}).to_string());
                    return;
                }
                let new = state.log.iter().filter(|(at, of, _)| *at > seen && *of == kind);
                for (_, _, event) in new {
                    let _ = lines.try_send(line(event));
                }
                seen = state.version;
            }
            tokio::select! {
                changed = changed.changed() => changed.expect("a cluster"),
                () = lines.closed() => return,
            }
        }
    });
    Body::from_stream(Lines(body))
}
