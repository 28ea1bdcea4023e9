//! `exposure.auto`: rules that export Services by labels, with Kubernetes' selectors.

use serde::Serialize;

use crate::yaml::Value;

/// Services that are exported without an object of their own that says so.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AutoExport {
    /// Which namespaces. Default: all, if `services` is given.
    pub namespaces: Option<Selector>,
    /// Which Services in them. Default: all, if `namespaces` is given.
    pub services: Option<Selector>,
    /// Which of these Services the rule leaves out. Default: none.
    pub except: Option<Selector>,
}

/// A selector of labels: all requirements must hold. There is at least one.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Selector(Vec<Requirement>);

/// What one label must be.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Requirement {
    key: String,
    operator: Operator,
    values: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
enum Operator {
    In,
    NotIn,
    Exists,
    DoesNotExist,
}

impl AutoExport {
    /// Whether the rule exports a Service with these labels in a namespace with those.
    pub fn exports<'a>(
        &self,
        namespace: impl Fn(&str) -> Option<&'a str>,
        service: impl Fn(&str) -> Option<&'a str>,
    ) -> bool {
        let namespaces = self.namespaces.as_ref();
        let in_namespace = namespaces.is_none_or(|selector| selector.matches(namespace));
        let services = self.services.as_ref();
        let is_left_out = self
            .except
            .as_ref()
            .is_some_and(|one| one.matches(&service));
        in_namespace && !is_left_out && services.is_none_or(|one| one.matches(&service))
    }
}

impl Selector {
    /// Whether it asks for no label but this one.
    pub fn is_about(&self, label: &str) -> bool {
        self.0.iter().all(|requirement| requirement.key == label)
    }

    /// Whether labels fit, which `label` finds by their keys. As in Kubernetes, a label that is
    /// not there is in no list.
    fn matches<'a>(&self, label: impl Fn(&str) -> Option<&'a str>) -> bool {
        self.0.iter().all(|requirement| {
            let value = label(&requirement.key);
            let is_listed = || {
                requirement
                    .values
                    .iter()
                    .any(|one| Some(one.as_str()) == value)
            };
            match requirement.operator {
                Operator::In => is_listed(),
                Operator::NotIn => !is_listed(),
                Operator::Exists => value.is_some(),
                Operator::DoesNotExist => value.is_none(),
            }
        })
    }
}

/// Reads one rule.
pub(super) fn rule(value: Value<'_>) -> Option<AutoExport> {
    let mut fields = value.fields("exposure.auto[]")?;
    let namespaces = fields.get("namespaces").map(selector);
    let services = fields.get("services").map(selector);
    let except = fields.get("except").map(selector);
    fields.finish();
    if namespaces.is_none() && services.is_none() {
        let how = "`{services: {matchLabels: {KEY: VALUE}}}`, or `exposure.default: all`";
        value.error("selects nothing by itself", how);
        return None;
    }
    // A selector that could not be read must not become none, which is every label.
    let read = |selector: Option<Option<Selector>>| match selector {
        Some(selector) => selector.map(Some),
        None => Some(None),
    };
    Some(AutoExport {
        namespaces: read(namespaces)?,
        services: read(services)?,
        except: read(except)?,
    })
}

fn selector(value: Value<'_>) -> Option<Selector> {
    let mut fields = value.fields("exposure.auto[] selector")?;
    let labels = fields.get("matchLabels").map_or(Some(Vec::new()), labels);
    let expressions = fields.get("matchExpressions");
    let expressions = expressions.map_or(Some(Vec::new()), |list| {
        let read: Vec<_> = list.items().map(expression).collect();
        read.into_iter().collect()
    });
    fields.finish();
    let mut all = labels?;
    all.extend(expressions?);
    if all.is_empty() {
        value.error(
            "is empty, which would select everything",
            "`{matchLabels: {KEY: VALUE}}`, or remove the key",
        );
        return None;
    }
    Some(Selector(all))
}

fn labels(value: Value<'_>) -> Option<Vec<Requirement>> {
    if !value.is_map() {
        value.error("is not a map", "`{KEY: VALUE}`");
        return None;
    }
    let read = value.pairs().map(|(entry, value)| {
        Some(Requirement {
            key: entry.key.to_string(),
            operator: Operator::In,
            values: vec![value.text_or_empty()?.to_owned()],
        })
    });
    let read: Vec<_> = read.collect();
    read.into_iter().collect()
}

fn expression(value: Value<'_>) -> Option<Requirement> {
    let mut fields = value.fields("matchExpressions[]")?;
    let key = fields.need("key", "team").and_then(Value::text);
    let words = [
        ("In", Operator::In),
        ("NotIn", Operator::NotIn),
        ("Exists", Operator::Exists),
        ("DoesNotExist", Operator::DoesNotExist),
    ];
    let operator = fields.need("operator", "In");
    let operator = operator.and_then(|value| value.choice(&words));
    let values = fields.get("values").map_or(Some(Vec::new()), |list| {
        let read: Vec<_> = list.items().map(Value::text_or_empty).collect();
        read.into_iter().map(|one| Some(one?.to_owned())).collect()
    });
    fields.finish();
    let (key, operator, values) = (key?, operator?, values?);
    let lists = matches!(operator, Operator::In | Operator::NotIn);
    if lists == values.is_empty() {
        let (what, how) = match lists {
            true => ("has no `values`", "`values: [VALUE]`"),
            false => (
                "has `values`, which its operator does not read",
                "it without them",
            ),
        };
        value.error(what, how);
        return None;
    }
    Some(Requirement {
        key: key.to_owned(),
        operator,
        values,
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::tests::with;
    use crate::yaml::Document;
    use crate::yaml::Report;

    fn read(text: &str) -> Result<AutoExport, String> {
        let document = Document::parse(Path::new("a.yaml"), text).unwrap();
        let report = Report::new(&document.file);
        let read = rule(Value::of_document(&document, &report));
        read.ok_or_else(|| report.into_findings().to_string())
    }

    /// Whether a rule exports a Service; labels are `KEY=VALUE KEY=VALUE`.
    fn exports(rule: &str, namespace: &'static str, service: &'static str) -> bool {
        let find = |labels: &'static str, key: &str| {
            let mut labels = labels.split(' ').filter_map(|one| one.split_once('='));
            labels.find(|(one, _)| *one == key).map(|(_, value)| value)
        };
        let rule = read(rule).unwrap();
        rule.exports(|key| find(namespace, key), |key| find(service, key))
    }

    #[test]
    fn a_rule_exports_what_all_its_selectors_fit() {
        let both = "{namespaces: {matchLabels: {team: a}}, services: {matchLabels: {tier: web}}}";
        for (namespace, service, want) in [
            ("team=a", "tier=web", true),
            ("team=b", "tier=web", false),
            ("team=a", "tier=db", false),
            ("", "", false),
        ] {
            assert_eq!(
                exports(both, namespace, service),
                want,
                "{namespace} {service}"
            );
        }
        let except = "{namespaces: {matchLabels: {a: b}}, except: {matchLabels: {own: true}}}";
        assert!(exports(except, "a=b", ""));
        assert!(!exports(except, "a=b", "own=true"));
    }

    #[test]
    fn operators_mean_what_they_mean_in_kubernetes() {
        for (expression, service, want) in [
            ("operator: In, values: [x, y]", "a=y", true),
            ("operator: In, values: [x, y]", "a=z", false),
            ("operator: In, values: [x, y]", "", false),
            ("operator: NotIn, values: [x]", "a=y", true),
            ("operator: NotIn, values: [x]", "a=x", false),
            ("operator: NotIn, values: [x]", "", true),
            ("operator: Exists", "a=", true),
            ("operator: Exists", "b=x", false),
            ("operator: DoesNotExist", "b=x", true),
            ("operator: DoesNotExist", "a=", false),
        ] {
            let rule = format!("services: {{matchExpressions: [{{key: a, {expression}}}]}}");
            assert_eq!(exports(&rule, "", service), want, "{expression} {service}");
        }
    }

    #[test]
    fn rules_need_files_and_files_have_to_exist() {
        let rule = "{services: {matchLabels: {a: b}}}";
        for (exposure, want) in [
            (format!("{{files: [Cargo.toml, src], auto: [{rule}]}}"), ""),
            (
                format!("{{auto: [{rule}]}}"),
                "11: error: `exposure.auto` selects Services of `exposure.files`, and there are",
            ),
            (
                "{files: [none.yaml]}".to_owned(),
                "11: error: `exposure.files[]` is `",
            ),
            (
                "{files: a}".to_owned(),
                "11: error: `exposure.files` is `a`; write a list",
            ),
        ] {
            let findings = with(&format!("exposure: {exposure}"));
            let good = findings.starts_with(want) && findings.is_empty() == want.is_empty();
            assert!(good, "{exposure}: {findings}");
        }
    }

    #[test]
    fn a_rule_that_would_select_everything_or_nothing_is_refused() {
        for (text, want) in [
            ("{}", "selects nothing by itself"),
            ("except: {matchLabels: {a: b}}", "selects nothing by itself"),
            ("services: {}", "is empty, which would select everything"),
            (
                "services: {matchLabels: {}}",
                "is empty, which would select everything",
            ),
            ("services: {matchLabel: {a: b}}", "unknown key `matchLabel`"),
            (
                "services: {matchLabels: [a]}",
                "is not a map; write `{KEY: VALUE}`",
            ),
            ("services: {matchLabels: {a: [b]}}", "is a list; write text"),
            (
                "services: {matchExpressions: [{key: a}]}",
                "has no `operator`",
            ),
            (
                "services: {matchExpressions: [{key: a, operator: in}]}",
                "cannot be `in`",
            ),
            (
                "services: {matchExpressions: [{key: a, operator: In}]}",
                "has no `values`",
            ),
            (
                "services: {matchExpressions: [{key: a, operator: Exists, values: [b]}]}",
                "has `values`, which its operator does not read",
            ),
        ] {
            let said = read(text).unwrap_err();
            assert!(said.contains(want), "{text}: {said}");
        }
    }
}
