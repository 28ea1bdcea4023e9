//! Kubelet for one pod of a Deployment: environment, volumes, root file system and user of its
//! first container, and the probes.
//!
//! A test runs in its own network and mount namespaces, so that a pod has the ports of its
//! manifest, and no mount remains.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with,
};
use serde_json::Value;
use tempfile::TempDir;
use tokio::process::{Child, Command};

use super::istiod::TOKEN;
use super::process::{http, send_signal};
use super::{identities, until};

/// Variable that marks a test process in its own namespaces.
const INSIDE: &str = "STRAIT_TEST_NAMESPACES";
/// Name and addresses that the scheduler, the CNI and the ReplicaSet would assign.
pub const POD: &str = "eastwest-7d9f5c6b8-x2x4z";
const POD_IP: &str = "10.244.1.7";
const NODE: (&str, &str) = ("node-1", "10.0.0.1");
/// Address of istiod's Service in these pods' `/etc/hosts`.
pub const ISTIOD: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2)), 15012);
/// Files of this machine that a dynamically linked binary needs.
const LIBRARIES: [&str; 4] = ["/lib", "/lib64", "/usr/lib", "/usr/lib64"];

/// Runs a test of this name again, in a process with its own network and mount namespaces. Skips it
/// if this user cannot create them.
pub fn in_namespaces(name: &str, test: impl FnOnce()) {
    if std::env::var_os(INSIDE).is_some() {
        raise_loopback();
        return test();
    }
    let unshare = |command: &mut std::process::Command| {
        let namespaces = ["--net", "--mount", "--propagation", "private"];
        command.args(namespaces).stdin(Stdio::null());
    };
    let mut trial = std::process::Command::new("unshare");
    unshare(&mut trial);
    let is_root = rustix::process::geteuid().is_root();
    if !is_root || !trial.arg("true").output().is_ok_and(|done| done.status.success()) {
        return super::skip(name, "namespaces cannot be made here; run it as root");
    }
    let mut inside = std::process::Command::new("unshare");
    unshare(&mut inside);
    inside.arg(std::env::current_exe().expect("this program"));
    inside.args(["--exact", name, "--nocapture", "--test-threads=1"]);
    let done = inside.env(INSIDE, "1").output().expect("this program again");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&done.stdout), text(&done.stderr));
    assert!(done.status.success() && out.contains("1 passed"), "{out}\n{err}");
}

/// Brings up the loopback interface of this network namespace, by RTM_NEWLINK (rtnetlink(7)).
fn raise_loopback() {
    let (newlink, request_ack, loopback, up) = (16_u16, 5_u16, 1_u32, 1_u32);
    let mut message = Vec::new();
    message.extend(32_u32.to_ne_bytes());
    message.extend(newlink.to_ne_bytes());
    message.extend(request_ack.to_ne_bytes());
    // Sequence number, port, family, padding and type.
    message.extend([0; 12]);
    message.extend(loopback.to_ne_bytes());
    message.extend(up.to_ne_bytes());
    message.extend(up.to_ne_bytes());
    // Protocol none means NETLINK_ROUTE.
    let (family, flags) = (AddressFamily::NETLINK, SocketFlags::CLOEXEC);
    let socket = socket_with(family, SocketType::RAW, flags, None);
    let socket = socket.expect("a netlink socket");
    send(&socket, &message, SendFlags::empty()).expect("a request");
    let mut answer = [0; 64];
    recv(&socket, &mut answer[..], RecvFlags::empty()).expect("an answer");
    assert_eq!(answer[16..20], [0; 4], "the error of the answer");
}

/// Runs a program of this machine until it ends.
fn do_run(program: &str, args: &[&str]) {
    let done = std::process::Command::new(program).args(args).output();
    let done = done.expect("a program");
    let error = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{program} {args:?}: {error}");
}

/// Returns a string of a manifest.
pub fn text<'a>(value: &'a Value, path: &str) -> &'a str {
    let found = value.pointer(path).and_then(Value::as_str);
    found.unwrap_or_else(|| panic!("{path} of {value} is text"))
}

/// Returns the entries of a list of a manifest; empty without a list.
pub fn list<'a>(value: &'a Value, path: &str) -> &'a [Value] {
    let list = value.pointer(path).and_then(Value::as_array);
    list.map_or(&[], |list| &**list)
}

/// Pod of a Deployment on this node. Its process is killed on drop.
pub struct Pod {
    /// Pod template, with the assigned name.
    pod: Value,
    folder: TempDir,
    process: Option<Child>,
}

impl Pod {
    /// Creates volumes and root file system, as for a container that has not started yet.
    pub fn new(deployment: &Value) -> Self {
        let mut pod = deployment["spec"]["template"].clone();
        pod["metadata"]["name"] = POD.into();
        pod["metadata"]["namespace"] = deployment["metadata"]["namespace"].clone();
        pod["metadata"]["labels"]["pod-template-hash"] = "7d9f5c6b8".into();
        let folder = tempfile::tempdir().expect("a folder");
        let new = Self { pod, folder, process: None };
        new.make_root();
        new
    }

    fn container(&self) -> &Value {
        &self.pod["spec"]["containers"][0]
    }

    /// Returns a field of the security context of the container, or else of the pod.
    fn security(&self, key: &str) -> &Value {
        match &self.container()["securityContext"][key] {
            Value::Null => &self.pod["spec"]["securityContext"][key],
            own => own,
        }
    }

    fn id(&self, key: &str) -> Option<u32> {
        let id = self.security(key).as_u64()?;
        Some(id.try_into().expect("an id"))
    }

    /// Returns a path in the root file system.
    pub fn file(&self, path: &str) -> PathBuf {
        self.folder.path().join("root").join(path.trim_start_matches('/'))
    }

    fn make_root(&self) {
        // Every user of the container must be able to traverse the folder.
        fs::set_permissions(self.folder.path(), Permissions::from_mode(0o755)).expect("a mode");
        let root = self.file("");
        fs::create_dir(&root).expect("a folder");
        bind(&root, &root, false);
        for folder in ["proc", "dev", "etc"] {
            fs::create_dir_all(root.join(folder)).expect("a folder");
        }
        for (file, text) in [
            ("strait", String::new()),
            ("etc/nsswitch.conf", "hosts: files dns\n".to_owned()),
            (
                "etc/hosts",
                format!("127.0.0.1 localhost\n{} istiod.istio-system.svc\n", ISTIOD.ip()),
            ),
        ] {
            fs::write(root.join(file), text).expect("a file");
        }
        bind(Path::new(env!("CARGO_BIN_EXE_strait")), &root.join("strait"), true);
        for folder in ["/proc", "/dev"] {
            bind(Path::new(folder), &self.file(folder), false);
        }
        for folder in LIBRARIES.iter().filter(|folder| Path::new(folder).exists()) {
            fs::create_dir_all(self.file(folder)).expect("a folder");
            bind(Path::new(folder), &self.file(folder), true);
        }
        for mount in list(self.container(), "/volumeMounts") {
            let is_named = |volume: &&Value| volume["name"] == mount["name"];
            let volume = list(&self.pod, "/spec/volumes").iter().find(is_named);
            let volume = volume.unwrap_or_else(|| panic!("no volume for {mount}"));
            let at = self.file(text(mount, "/mountPath"));
            fs::create_dir_all(&at).expect("a folder");
            let is_read_only = mount["readOnly"] == true || volume["emptyDir"].is_null();
            bind(&self.volume(volume), &at, is_read_only);
        }
        if *self.security("readOnlyRootFilesystem") == true {
            do_run("mount", &["-o", "remount,bind,ro", &root.to_string_lossy()]);
        }
    }

    /// Creates a volume, of the kinds that the manifests use.
    fn volume(&self, volume: &Value) -> PathBuf {
        let at = self.folder.path().join(text(volume, "/name"));
        fs::create_dir(&at).expect("a folder of its own");
        if let Some(empty) = volume.get("emptyDir") {
            if empty["medium"] == "Memory" {
                do_run("mount", &["-t", "tmpfs", "tmpfs", &at.to_string_lossy()]);
            }
            let group = self.id("fsGroup");
            chown(&at, None, group).expect("a group");
            let mode = if group.is_some() { 0o2777 } else { 0o777 };
            fs::set_permissions(&at, Permissions::from_mode(mode)).expect("a mode");
            return at;
        }
        let sources = match volume.get("projected") {
            Some(projected) => list(projected, "/sources"),
            None => std::slice::from_ref(volume),
        };
        for source in sources {
            self.project(source, &at);
        }
        at
    }

    fn project(&self, source: &Value, at: &Path) {
        if let Some(token) = source.get("serviceAccountToken") {
            let file = put(at, text(token, "/path"), TOKEN);
            // Readable by the pod's group if it has one, else only by its user.
            let (owner, group) = match self.id("fsGroup") {
                Some(group) => (None, Some(group)),
                None => (self.id("runAsUser"), None),
            };
            chown(&file, owner, group).expect("an owner");
            let mode = if group.is_some() { 0o640 } else { 0o600 };
            fs::set_permissions(&file, Permissions::from_mode(mode)).expect("a mode");
        } else if let Some(map) = source.get("configMap") {
            match text(map, "/name") {
                "istio-ca-root-cert" => drop(put(at, "root-cert.pem", &identities().root)),
                name => assert_eq!(map["optional"], true, "{name} does not exist"),
            }
        } else if let Some(api) = source.get("downwardAPI") {
            for item in list(api, "/items") {
                let field = text(item, "/fieldRef/fieldPath").replace('.', "/");
                let entries = self.pod.pointer(&format!("/{field}"));
                let entries = entries.and_then(Value::as_object).expect("a map");
                // JSON quotes a string as the kubelet does.
                let lines = entries.iter().map(|(key, value)| format!("{key}={value}"));
                put(at, text(item, "/path"), &lines.collect::<Vec<_>>().join("\n"));
            }
        } else {
            panic!("a kind of volume that this kubelet does not know: {source}");
        }
    }

    /// Returns the value of a field of the pod, as in the downward API.
    fn field(&self, path: &str) -> String {
        match path {
            "status.podIP" => POD_IP.to_owned(),
            "status.hostIP" => NODE.1.to_owned(),
            "spec.nodeName" => NODE.0.to_owned(),
            path => text(&self.pod, &format!("/{}", path.replace('.', "/"))).to_owned(),
        }
    }

    fn environment(&self) -> BTreeMap<String, String> {
        let mut all = BTreeMap::new();
        for variable in list(self.container(), "/env") {
            let value = match (&variable["value"], &variable["valueFrom"]) {
                (Value::String(value), _) => expanded(value, &all),
                (_, from) if from["fieldRef"].is_object() => {
                    self.field(text(from, "/fieldRef/fieldPath"))
                }
                (_, from) => match text(from, "/resourceFieldRef/resource") {
                    "limits.cpu" => "2".to_owned(),
                    "limits.memory" => (1_u64 << 30).to_string(),
                    other => panic!("a resource that this kubelet does not know: {other}"),
                },
            };
            all.insert(text(variable, "/name").to_owned(), value);
        }
        all
    }

    /// Starts the container, or restarts it.
    pub fn start(&mut self) {
        let environment = self.environment();
        let user = self.id("runAsUser").expect("a user");
        let group = self.id("runAsGroup").expect("a group");
        let mut log = fs::File::options();
        let log = log.append(true).create(true).open(self.log_file());
        let mut command = Command::new("setpriv");
        if *self.security("allowPrivilegeEscalation") == false {
            command.arg("--no-new-privs");
        }
        let groups = self.id("fsGroup").unwrap_or(group);
        command
            .arg("chroot")
            .arg(format!("--userspec={user}:{group}"))
            .arg(format!("--groups={groups}"))
            .arg(self.file(""))
            .arg("/strait");
        for argument in list(self.container(), "/args") {
            command.arg(expanded(argument.as_str().expect("text"), &environment));
        }
        command.env_clear().env("PATH", "/usr/bin:/usr/sbin:/bin:/sbin");
        command.envs(environment);
        let process = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log.expect("a log"))
            .kill_on_drop(true)
            .spawn();
        self.process = Some(process.expect("the container's process"));
    }

    fn log_file(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    /// Returns the log of all starts of the container.
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_file()).expect("the log")
    }

    /// Sends a GET request to a port of the pod.
    pub async fn get(&self, port: u16, path: &str) -> (u16, String) {
        http(SocketAddr::from((Ipv4Addr::LOCALHOST, port)), "GET", path).await
    }

    /// Runs the startup probe until the pod is ready, more often than its period.
    pub async fn ready(&self) {
        let probe = &self.container()["startupProbe"];
        let number = |key: &str| probe[key].as_u64().expect("a number");
        let most = Duration::from_secs(number("failureThreshold") * number("periodSeconds"));
        let port = probe["httpGet"]["port"].as_u64().expect("a port");
        let (port, path) = (port.try_into().expect("a port"), text(probe, "/httpGet/path"));
        let probe = async || self.get(port, path).await;
        let ready = tokio::time::timeout(most, async {
            until("readiness", probe, |(status, _)| *status == 200).await
        });
        let ready = ready.await;
        assert!(ready.is_ok(), "the pod is not ready:\n{}", self.log());
    }

    /// Returns a line of `/proc/PID/status` of the container's process.
    pub fn proc_status(&self, key: &str) -> String {
        let id = self.process.as_ref().and_then(Child::id).expect("a process");
        let status = fs::read_to_string(format!("/proc/{id}/status")).expect("a status");
        let line = status.lines().find_map(|line| line.strip_prefix(key));
        let words = line.expect("the line").split_whitespace();
        words.collect::<Vec<_>>().join(" ")
    }

    /// Sends a signal to the container.
    pub fn signal(&self, signal: rustix::process::Signal) {
        send_signal(self.process.as_ref().expect("a process"), signal);
    }

    /// Waits for the end of the container. Returns true if it succeeded.
    pub async fn ended(&mut self) -> bool {
        let mut process = self.process.take().expect("a process");
        process.wait().await.expect("a status").success()
    }
}

/// Bind-mounts a file or a folder.
fn bind(from: &Path, at: &Path, is_read_only: bool) {
    let (from, at) = (from.to_string_lossy(), at.to_string_lossy());
    do_run("mount", &["--bind", &from, &at]);
    if is_read_only {
        do_run("mount", &["-o", "remount,bind,ro", &at]);
    }
}

/// Writes a file as the kubelet does: behind a link that it swaps.
fn put(folder: &Path, name: &str, text: &str) -> PathBuf {
    let (data, link) = (folder.join("..2026_11_22"), folder.join("..data"));
    fs::create_dir_all(&data).expect("a folder");
    if !link.is_symlink() {
        symlink("..2026_11_22", &link).expect("a link");
    }
    fs::write(data.join(name), text).expect("a file");
    symlink(Path::new("..data").join(name), folder.join(name)).expect("a link");
    data.join(name)
}

/// Replaces `$(NAME)` by the preceding variables, as Kubernetes does.
fn expanded(text: &str, environment: &BTreeMap<String, String>) -> String {
    let replace = |text: String, (name, value): (&String, &String)| {
        text.replace(&format!("$({name})"), value)
    };
    environment.iter().fold(text.to_owned(), replace)
}
